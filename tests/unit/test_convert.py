"""`esolm convert`: code in files is not executed, and wrong files leave no folder behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import esolm
from esolm import cli
from esolm.core.visibility import full
from esolm.data import tokenizer
from esolm.interop import released
from esolm.interop.ckpt import Checkpoint, plain
from esolm.interop.convert import convert
from esolm.likelihood.scoring import score
from esolm.likelihood.texts import read
from esolm.storage import folder
from support import toy
from support.released import to_released

BYTES = tokenizer("bytes")
L = 8
ALGO = {
    "name": "esolm", "alpha_0": 0.25, "batch_split": 0.5, "diffusion_shuffle": True, "diffusion_attn_mode": "causal",
    "sequential_shuffle": True, "sequential_attn_mode": "causal", "time_conditioning": False,
}  # fmt: skip
MODEL = {"hidden_size": 16, "n_blocks": 2, "n_heads": 2, "cond_dim": 4, "length": L}


def content(seed: int = 0, algo: dict[str, Any] | None = None, **sizes: Any) -> dict[str, Any]:
    """What a Lightning checkpoint of a toy network holds."""
    net = toy.network(BYTES.vocab_size, L, torch.float32, seed, **sizes)
    state = to_released(net.state_dict(), net.config)
    shadow = [t + 1 for name, t in state.items() if not name.endswith(released.ROTARY)]
    config = {"algo": ALGO if algo is None else algo, "model": MODEL}
    kept = {"config": config, "vocab_size": BYTES.vocab_size}
    return {"state_dict": state, "ema": {"shadow_params": shadow}, "global_step": 7, "hyper_parameters": kept}


def save(path: Path, what: Any) -> Path:
    torch.save(what, path)
    return path


def refused(path: Path | str, out: Path, *words: str, **options: Any) -> str:
    """The message of the error, in one line; the parent of `out` must be unchanged."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(ValueError) as caught:
        convert(str(path), out, **{"tokenizer": "bytes", **options})
    assert sorted(out.parent.iterdir()) == before
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message
    return message


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "out"


def test_averaged_and_raw_weights(tmp_path: Path, out: Path) -> None:
    path = save(tmp_path / "a.ckpt", what := content())
    raw, ema = (convert(str(path), out, tokenizer="bytes", weights=w, force=True) for w in ("raw", "ema"))
    assert torch.equal(raw.net.head.bias, what["state_dict"]["backbone.output_layer.linear.bias"])
    assert torch.equal(ema.net.head.bias, raw.net.head.bias + 1)
    assert ema.system == toy.make("esolm", BYTES.mask_id, alpha_0=0.25, bos_id=BYTES.bos_id)
    assert json.loads((out / "config.json").read_text())["about"]["steps"] == 7
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    again = to_released(raw.net.state_dict(), raw.net.config)
    assert list(again) == list(what["state_dict"])
    assert all(torch.equal(again[name], what["state_dict"][name]) for name in again)


def test_a_compiled_network_and_the_perplexity_of_a_text(tmp_path: Path, out: Path, capsys) -> None:
    what = content()
    what["state_dict"] = {k.replace("backbone.", "backbone._orig_mod."): t for k, t in what["state_dict"].items()}
    (text := tmp_path / "a.txt").write_text("to be or not to be")
    path, options = save(tmp_path / "a.ckpt", what), ["--tokenizer", "bytes", "--weights", "raw"]
    assert cli.main(["convert", str(path), str(out), *options, "--text", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(out)
    check = json.loads((out / "config.json").read_text())["about"]["check"]
    assert check["tokens"] == len("to be or not to be") + 1
    lm = esolm.load(out)
    assert check["perplexity"] == score(lm, read(str(text), lm.tokenizer, lm.net.config.length)).record()["perplexity"]
    assert "no file" in refused(path, tmp_path / "made" / "b", text=str(tmp_path / "none"))


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.trace, 0o777, True)


def test_code_in_a_file_is_not_executed(tmp_path: Path, out: Path) -> None:
    trace = tmp_path / "trace"
    hidden = {**content(), "callbacks": Evil(trace)}
    hidden["hyper_parameters"] = {**hidden["hyper_parameters"], "tokenizer": Evil(trace)}
    for name, what in {"hidden": hidden, "whole": Evil(trace), "state": {"state_dict": Evil(trace)}}.items():
        path = save(tmp_path / f"{name}.ckpt", what)
        torch.load(path, weights_only=False)
        assert trace.is_dir()  # torch.load executes it
        trace.rmdir()
        if name == "hidden":
            convert(str(path), out, tokenizer="bytes")
        else:
            refused(path, tmp_path / "made" / "no")
        assert not trace.exists()


def pickled(path: Path, program: bytes) -> Path:
    """A zip as torch.save writes it, of a handwritten pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
    return path


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'mkdir TRACE'\ntR.",
        b"(S'mkdir TRACE'\nios\nsystem\n.",
        b'c__builtin__\neval\n(S\'__import__("os").mkdir("TRACE")\'\ntR.',
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0bmkdir TRACE\x85R.",
        b"c_codecs\nencode\n(dS'make'\ncos\nsystem\nsb(S'mkdir TRACE'\ntR.",  # replaces a constructor
        b"ccollections\nOrderedDict\n(dS'make'\ncos\nsystem\nsb.",
        b"c_codecs\nencode\n(N(dS'make'\ncos\nsystem\nstb(S'mkdir TRACE'\ntR.",
    ],
)
def test_handwritten_pickles_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    (made := tmp_path / "made").mkdir()
    refused(pickled(tmp_path / "a.ckpt", program), made / "out")
    assert not (tmp_path / "TRACE").exists()
    path = save(tmp_path / "good.ckpt", content())
    convert(str(path), made / "out", tokenizer="bytes")  # the constructors are as they were


def test_shared_parts_are_read_once(tmp_path: Path) -> None:
    tree: Any = {"x": 1}
    for _ in range(60):
        tree = {"a": tree, "b": tree}
    what = content()
    what["hyper_parameters"]["config"]["callbacks"] = tree
    kept = Checkpoint(save(tmp_path / "a.ckpt", what)).tree["hyper_parameters"]
    assert plain(kept["config"])["algo"]["alpha_0"] == 0.25


def test_damaged_and_foreign_files(tmp_path: Path, out: Path) -> None:
    whole = save(tmp_path / "a.ckpt", content()).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.ckpt", out, "cut.ckpt cannot be read", "damaged")
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    refused(tmp_path / "text.ckpt", out, "text.ckpt cannot be read")
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps({"state_dict": {}}))
    refused(tmp_path / "plain.ckpt", out, "cannot be read")
    refused(tmp_path / "none.ckpt", out, "no file or folder")
    refused(tmp_path, out, "no folder with config.json and model.safetensors")
    refused(save(tmp_path / "b.ckpt", {"weights": 1}), out, "no state_dict")
    foreign = save(tmp_path / "c.ckpt", {"state_dict": {"fc.weight": torch.ones(2, 2)}})
    refused(foreign, out, "fc.weight", system="mdlm", weights="raw")
    huge = content()
    huge["state_dict"]["backbone.vocab_embed.embedding"] = torch.zeros(1).expand(BYTES.vocab_size, 16)
    huge["ema"] = None
    refused(save(tmp_path / "d.ckpt", huge), out, "cannot be read", weights="raw")


def test_wrong_names_shapes_and_lists(tmp_path: Path, out: Path) -> None:
    path, name = tmp_path / "a.ckpt", "backbone.blocks.1.mlp.2.bias"
    what = content()
    what["state_dict"][name + "es"] = what["state_dict"].pop(name)
    refused(save(path, what), out, "blocks.1.mlp.2.bias is missing", "blocks.1.mlp.2.biases is unknown", weights="raw")
    what = content()
    what["state_dict"][name] = torch.ones(3)
    refused(save(path, what), out, "blocks.1.mlp.2.bias has shape (3,) instead of (16,)", weights="raw")
    refused(path, out, "the averaged weight of", name, "instead of (3,)")
    what = content()
    what["ema"]["shadow_params"].pop()
    refused(save(path, what), out, "29 averaged weights for 30 parameters")
    what = {**content(), "ema": None}
    refused(save(path, what), out, "no averaged weights", "--weights raw")
    what["state_dict"]["backbone.rotary_emb.inv_freq"] *= 2
    refused(save(path, what), out, "rotary embedding", weights="raw")
    what = content()
    what["hyper_parameters"]["config"]["model"] = {**MODEL, "n_blocks": 3}
    refused(save(path, what), out, "layers 3", "have 2")


def test_the_vocabulary_must_match(tmp_path: Path, out: Path) -> None:
    path = save(tmp_path / "a.ckpt", content())
    words = tokenizer("bpe:300", ["the cat and the dog and a cat " + chr(200 + i) * 9 for i in range(50)])
    (tmp_path / "words").mkdir()
    words.save(tmp_path / "words")
    refused(path, out, f"a vocabulary of {BYTES.vocab_size}", "301", tokenizer=str(tmp_path / "words"))
    refused(path, out, "has no tokenizer", "--tokenizer", tokenizer=None)


def test_systems_come_from_the_file_or_an_option(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.ckpt"
    refused(save(path, content(algo={"name": "duo", "time_conditioning": False})), out, "time_conditioning False")
    refused(save(path, content(algo={"name": "plaid"})), out, "'plaid'", "choose ar, mdlm, bd3lm, esolm")
    refused(save(path, content(algo={**ALGO, "time_conditioning": True})), out, "time_conditioning")
    refused(save(path, content(algo={**ALGO, "diffusion_shuffle": False})), out, "neither variant A nor B")
    refused(save(path, content(algo={**ALGO, "diffusion_attn_mode": "mixed2"})), out, "neither variant A nor B")
    save(path, content())
    refused(path, out, "--alpha_0 is 0.5", "0.25", alpha_0=0.5)
    refused(path, out, "--system is 'mdlm'", "'esolm'", system="mdlm")
    what = content()
    del what["hyper_parameters"]["config"]["algo"]
    refused(save(path, what), out, "--system")
    refused(path, out, "--alpha_0", system="esolm")
    refused(path, out, "--variant", system="esolm", alpha_0=1.0)
    refused(path, out, "leave --alpha_0 out", system="mdlm", alpha_0=1.0)
    made = convert(str(path), out, system="esolm", alpha_0=1.0, variant="A", tokenizer="bytes")
    assert made.system == toy.make("esolm", BYTES.mask_id, alpha_0=1.0, variant="A", bos_id=BYTES.bos_id)
    assert convert(str(path), out, "mdlm", tokenizer="bytes", force=True).system == toy.make("mdlm", BYTES.mask_id)
    variant_a = {**ALGO, "diffusion_attn_mode": "mixed2", "sequential_attn_mode": "mixed", "sequential_shuffle": False}
    made = convert(str(save(path, content(algo=variant_a))), out, tokenizer="bytes", force=True)
    assert made.system.variant == "A"


def test_the_other_repositories(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.ckpt"
    what = content()
    what["hyper_parameters"]["config"] = {"parameterization": "subs", "backbone": "dit", "model": MODEL}
    assert convert(str(save(path, what)), out, tokenizer="bytes").system == toy.make("mdlm", BYTES.mask_id)
    what["hyper_parameters"]["config"] = {"algo": {"name": "bd3lm"}, "block_size": "${model.length}", "model": MODEL}
    made = convert(str(save(path, what)), out, tokenizer="bytes", force=True)
    assert made.system == toy.make("bd3lm", BYTES.mask_id, block_size=L)
    for name in ("duo", "duo_base", "distillation"):
        algo = {"name": name, "time_conditioning": True}
        made = convert(str(save(path, content(algo=algo))), out, tokenizer="bytes", force=True)
        assert made.system == toy.make("duo", BYTES.mask_id, vocab_size=BYTES.vocab_size, noise_mask=True)
    uniform = {"parameterization": "d3pm", "diffusion": "uniform", "T": 0, "time_conditioning": True, "model": MODEL}
    what["hyper_parameters"]["config"] = uniform
    made = convert(str(save(path, what)), out, tokenizer="bytes", force=True)
    assert made.system == toy.make("udlm", BYTES.mask_id, vocab_size=BYTES.vocab_size, noise_mask=True)
    assert len(made.sample(num_samples=1, length=8, num_steps=2).tokens[0]) == 8
    made = convert(str(save(path, content(algo={"name": "sedd"}))), out, tokenizer="bytes", weights="raw", force=True)
    options = {"noise": "absorb", "schedule": "loglinear", "vocab_size": BYTES.vocab_size}
    assert made.system == toy.make("sedd", BYTES.mask_id, **options)
    what["hyper_parameters"]["config"] = {**uniform, "T": 1000}
    refused(save(path, what), out.with_name("other"), "'d3pm'")
    made = convert(str(save(path, content(algo={"name": "ar"}, adaln=False))), out, tokenizer="bytes", force=True)
    assert made.system == toy.make("ar", BYTES.mask_id, first="bos", bos_id=BYTES.bos_id)
    assert made.log_prob("to be").kind == "exact"


def test_hugging_face_folders(tmp_path: Path, out: Path) -> None:
    net = toy.network(BYTES.vocab_size, L, torch.float32)
    state = to_released(net.state_dict(), net.config, "")
    (hf := tmp_path / "hf").mkdir()
    config = {"hidden_size": 16, "n_blocks": 2, "n_heads": 2, "cond_dim": 4, "model_length": L, "model_type": "EsoLM"}

    def write(**more: Any) -> Path:
        save_file({name: t.contiguous() for name, t in state.items()}, hf / "model.safetensors")
        (hf / "config.json").write_text(json.dumps({**config, **more}))
        return hf

    refused(write(), out, "--alpha_0")
    refused(write(mask_index=3), out, "is 3", alpha_0=1.0, variant="B")
    refused(write(vocab_size=9), out, "vocab_size 9", alpha_0=1.0, variant="B")
    refused(write(), out, "raw", alpha_0=1.0, variant="B", weights="raw")
    made = convert(str(write(mask_index=BYTES.mask_id)), out, alpha_0=1.0, variant="B", tokenizer="bytes")
    assert all(torch.equal(a, b) for a, b in zip(made.net.state_dict().values(), net.state_dict().values()))
    refused(write(model_type="bd3lm", block_size=4, causal=False), out, "exists")
    made = convert(str(hf), out, tokenizer="bytes", force=True)
    assert made.system == toy.make("bd3lm", BYTES.mask_id, block_size=4)
    for name, kind in (("DUO", "duo"), ("udlm", "udlm")):
        made = convert(str(write(model_type=name)), out, tokenizer="bytes", force=True)
        assert made.system == toy.make(kind, BYTES.mask_id, vocab_size=BYTES.vocab_size, noise_mask=True)
    (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:999])
    refused(hf, out.with_name("other"), "damaged", system="mdlm")


def test_a_model_is_replaced_after_an_earlier_process_was_killed(tmp_path: Path, out: Path) -> None:
    path = save(tmp_path / "a.ckpt", content())
    convert(str(path), out, tokenizer="bytes")
    shutil.copytree(out, out.with_name(f".{out.name}.old"))
    convert(str(path), out, tokenizer="bytes", force=True)
    assert not list(out.parent.glob(".*"))


def test_only_models_are_replaced_and_no_empty_parents_stay(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt", content())
    (mine := tmp_path / "mine").mkdir()
    (mine / "notes.txt").write_text("keep me")
    refused(path, mine, "exists", force=True)
    assert (mine / "notes.txt").read_text() == "keep me"
    with pytest.raises(ValueError, match="--system"):
        convert(str(path), tmp_path / "new" / "deep" / "out", "mdlm", tokenizer="bytes")
    assert not (tmp_path / "new").exists()


def test_a_folder_imports_no_module_that_it_names(tmp_path: Path, out: Path) -> None:
    convert(str(save(tmp_path / "a.ckpt", content())), out, tokenizer="bytes")
    config = json.loads((out / "config.json").read_text())
    config["system"] = {"name": "antigravity.Class"}
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="import antigravity"):
        folder.read(out)
    with pytest.raises(ValueError, match="one set of weights"):
        esolm.load(out, weights="model")


SEDD = {
    "tokens": BYTES.vocab_size - 1, "graph": {"type": "absorb", "file": "data"}, "training": {"ema": 0.9999},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {**MODEL, "scale_by_sigma": True, "dropout": 0.1},
}  # fmt: skip


def sedd_folder(path: Path, **changes: Any) -> Path:
    """A folder as the authors of SEDD push it to the hub."""
    path.mkdir()
    net = toy.network(BYTES.vocab_size, L, torch.float32)
    state = to_released(net.state_dict(), net.config, prefix="")
    save_file({name: t for name, t in state.items() if not name.endswith(released.ROTARY)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**SEDD, **changes}))
    return path


def test_a_released_sedd(tmp_path: Path, out: Path) -> None:
    """The network is fed sigma, and its scores are the authors': logits minus log(e^sigma - 1) and log(D - 1)."""
    lm = convert(str(sedd_folder(tmp_path / "sedd")), out, tokenizer="bytes")
    assert (lm.system.name, lm.system.noise, lm.system.schedule) == ("sedd", "absorb", "loglinear")
    assert (lm.system.vocab_size, lm.system.mask_id) == (BYTES.vocab_size, BYTES.mask_id)
    net = toy.network(BYTES.vocab_size, L, torch.float32)
    tokens, sigma = toy.text(2, L, BYTES.vocab_size), torch.tensor([0.1, 3.0])
    expected = net(tokens, torch.arange(L)[None], full(L), sigma)
    assert torch.equal(lm.net(tokens, torch.arange(L)[None], full(L), sigma), expected)
    assert (expected[0] - net(tokens, torch.arange(L)[None], full(L), sigma.flip(0))[0]).abs().max() > 0.01
    assert (
        lm.sample(num_samples=2, num_steps=4, seed=1).tokens
        == esolm.load(out).sample(num_samples=2, num_steps=4, seed=1).tokens
    )


def test_a_sedd_with_uniform_noise_keeps_its_states(tmp_path: Path, out: Path) -> None:
    changes = {"graph": {"type": "uniform"}, "noise": {"type": "geometric", "sigma_min": 1e-3, "sigma_max": 10}}
    made = sedd_folder(tmp_path / "u", model={**SEDD["model"], "scale_by_sigma": False}, **changes)
    lm = convert(str(made), out, tokenizer="bytes")
    assert (lm.system.noise, lm.system.sigma_min, lm.system.sigma_max) == ("uniform", 1e-3, 10)
    assert lm.system.states.states == BYTES.vocab_size


def test_a_foreign_sedd_is_refused(tmp_path: Path, out: Path) -> None:
    unscaled = {**SEDD["model"], "scale_by_sigma": False}
    changes = ({"graph": {"type": "band"}}, {"noise": {"type": "cosine"}}, {"model": unscaled})
    for i, change in enumerate(changes):
        refused(sedd_folder(tmp_path / f"s{i}", **change), out, "esolm does not support")
