"""The authors' checkpoint gives exactly their averaged weights; the parameter names of their full-size models convert
in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

import esolm
from esolm import cli
from esolm.core.visibility import causal, full
from esolm.data.tokenizer import EOS
from esolm.interop import released
from esolm.interop.ckpt import Checkpoint
from esolm.interop.convert import convert
from support.released import to_released

HERE = Path(__file__).parent
CKPT = HERE / "lightning_tiny.ckpt"
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def keys(name: str) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Names and shapes of a full-size model, and the order of its averaged weights."""
    head, _, tail = (HERE / f"keys_small_{name}.txt").read_text().partition("# EMA order")
    found = re.findall(r"^(\S+)\s+\(([\d, ]*)\) float32$", head, re.M)
    shapes = {key: tuple(int(n) for n in shape.split(",") if n.strip()) for key, shape in found}
    return shapes, re.findall(r"^\s*\d+ (\S+)$", tail, re.M)


def test_the_averaged_weights_are_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(CKPT), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "esolm (alpha_0 0.5" in printed
    assert "144,562 parameters" in printed
    lm = esolm.load(tmp_path / "out")
    assert (lm.system.alpha_0, lm.system.variant, lm.system.kappa, lm.system.mask_id) == (0.5, "B", 0.5, 49)
    expected = load_file(HERE / "lightning_tiny.ema_expected.safetensors")
    found = to_released(lm.net.state_dict(), lm.net.config)
    assert found.keys() - expected.keys() <= {"backbone.rotary_emb.inv_freq"}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert lm.tokenizer.encode("w7") == [7]
    assert lm.sample(num_samples=2, seed=1).tokens == esolm.load(tmp_path / "out").sample(num_samples=2, seed=1).tokens


def test_the_raw_weights_on_request(tmp_path: Path) -> None:
    lm, file = convert(str(CKPT), tmp_path / "out", weights="raw"), Checkpoint(CKPT)
    found = to_released(lm.net.state_dict(), lm.net.config)
    assert list(found) == list(file.tree["state_dict"])
    for name, stored in file.tree["state_dict"].items():
        torch.testing.assert_close(found[name], file.load(stored), rtol=1e-6, atol=0)
    averaged = convert(str(CKPT), tmp_path / "averaged")
    assert not torch.equal(averaged.net.embed.weight, lm.net.embed.weight)


def test_a_converted_folder_gives_the_authors_logits(tmp_path: Path) -> None:
    """Their state dict as a Hugging Face folder, with and without the prefix."""
    diffusion = load_file(HERE / "diffusion.safetensors")
    tokenizer = convert(str(CKPT), tmp_path / "tokenizer").tokenizer
    for prefix in ("backbone.", ""):
        lm = convert(str(hugging_face(tmp_path / f"hf{prefix}", prefix, tokenizer)), tmp_path / f"out{prefix}")
        assert type(lm.system).__module__.endswith("mdlm")
        sigma, z = diffusion["sort_idx"], diffusion["zt_sorted"]
        torch.testing.assert_close(lm.net(z, sigma, full(16)), diffusion["logits_bidirectional"], **CLOSE)
        torch.testing.assert_close(lm.net(z, sigma, causal(16)), diffusion["logits_B_causal"], **CLOSE)


def hugging_face(folder: Path, prefix: str, tokenizer: esolm.data.Tokenizer) -> Path:
    """A folder as the authors push it."""
    import json

    from safetensors.torch import save_file

    folder.mkdir()
    state = load_file(HERE / "state_dict.safetensors")
    save_file({prefix + name.removeprefix("backbone."): t for name, t in state.items()}, folder / "model.safetensors")
    sizes = {"hidden_dim": 64, "n_blocks": 2, "n_heads": 4, "cond_dim": 32, "model_length": 16, "vocab_size": 50}
    (folder / "config.json").write_text(json.dumps({"model_type": "mdlm", "time_conditioning": False, **sizes}))
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("name", ["esolm", "mdlm", "ar"])
def test_full_size_names_are_all_known_in_both_directions(name: str) -> None:
    shapes, ema_order = keys(name)
    state: dict[str, Tensor] = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    rotary = next(key for key in shapes if key.endswith(released.ROTARY))
    state[rotary] = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    plain = {k.removeprefix("backbone."): t for k, t in state.items()}
    source = released.ReleasedCheckpoint(Path(name), plain, {"model.length": 1024, "model.n_heads": 12}, None)
    with torch.device("meta"):
        net = released.make_net(source)  # refuses what is missing or left over
        back = to_released(net.state_dict(), net.config)
    assert (net.config.layers, net.config.width, net.config.vocab_size) == (12, 768, 50258)
    assert net.config.adaln == (name != "ar")
    assert {key: tuple(t.shape) for key, t in back.items()} == shapes
    assert list(back) == list(shapes)
    assert [key for key in back if not key.endswith(released.BUFFERS)] == ema_order


@pytest.mark.slow
@pytest.mark.parametrize("name", ["esolm", "mdlm", "ar"])
def test_full_size_files_convert(tmp_path: Path, name: str) -> None:
    """A full-size file with random weights becomes a model with exactly these weights."""
    shapes, ema_order = keys(name)
    state = {key: torch.randn(shape).half() / 30 for key, shape in shapes.items()}
    state["backbone.rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    algo = {"name": name, "alpha_0": 0.25, "diffusion_shuffle": True, "sequential_shuffle": True}
    algo |= {"diffusion_attn_mode": "causal", "sequential_attn_mode": "causal"}
    model = {"hidden_size": 768, "n_blocks": 12, "n_heads": 12, "cond_dim": 128, "length": 1024}
    kept = {"config": {"algo": algo, "model": model}, "vocab_size": 50258}
    what = {"state_dict": state, "ema": {"shadow_params": [state[key] for key in ema_order]}, "hyper_parameters": kept}
    torch.save(what, tmp_path / "a.ckpt")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(50256)} | {EOS: 50256}))
    words.save(str(tmp_path / "words.json"))
    lm = convert(str(tmp_path / "a.ckpt"), tmp_path / "out", tokenizer=str(tmp_path / "words.json"))
    back = to_released(lm.net.state_dict(), lm.net.config)
    assert back.keys() == state.keys()
    assert [key for key in ema_order if not torch.equal(back[key], state[key].float())] == []
    (tmp_path / "a.ckpt").unlink()
    (tmp_path / "out" / "model.safetensors").unlink()  # half a gigabyte each
