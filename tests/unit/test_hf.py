"""transformers: round trips keep the weights, padding is not learned, and Trainer trains the model."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiments.runner import document, spec
from experiments.stories import report
from safetensors.torch import load_file

import esolm
from esolm import cli
from esolm.cli.info import describe
from esolm.core import order
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness, fold
from esolm.core.visibility import block
from esolm.data import tokenizer
from esolm.model import LanguageModel
from esolm.storage.folder import PACKAGED
from support import foreign, toy
from support.runs import make_run

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'esolm[hf]'")
from esolm.interop import export, hf  # noqa: E402

BYTES = tokenizer("bytes")
GOLDEN = Path(__file__).parent.parent / "golden"
L = 8
SYSTEMS = {
    "esolm": {"alpha_0": 0.5}, "mdlm": {}, "bd3lm": {"block_size": 4}, "ar": {"first": "bos", "bos_id": BYTES.bos_id},
}  # fmt: skip


def model(name: str, **options: Any) -> LanguageModel:
    net = toy.network(BYTES.vocab_size, L, torch.float32)
    return LanguageModel(net, toy.make(name, BYTES.mask_id, **{**SYSTEMS[name], **options}), BYTES)


def masked(batch: int = 3) -> torch.Tensor:
    """Texts with every other token masked; the first is all masks."""
    x = toy.text(batch, L, 90)
    x[:, ::2] = BYTES.mask_id
    x[0] = BYTES.mask_id
    return x


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether all weights are bit-exact."""
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", toy.one_of_each())
def test_an_exported_model_is_the_same_model(tmp_path: Path, name: str) -> None:
    """Weights, options, samples and scores of every system, through `esolm export` and through transformers."""
    run = make_run(tmp_path / "run", name, **toy.one_of_each()[name])
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    lm, batch = esolm.load(run), Batch(toy.text(2, L, 90))
    options = {"num_steps": 8} if "num_steps" in next(iter(lm.system.samplers.values())) else {}
    samples = lm.sample(num_samples=2, seed=3, **options).tokens
    nats = [term.nats for term in lm.system.terms(lm.net, batch, Randomness(0, 0, 2), False)]
    for folder in ("out", "again"):
        other = esolm.load(tmp_path / folder)
        assert other.system == lm.system
        assert same_weights(other.net, lm.net)
        assert other.sample(num_samples=2, seed=3, **options).tokens == samples
        for one, two in zip(nats, other.system.terms(other.net, batch, Randomness(0, 0, 2), False), strict=True):
            torch.testing.assert_close(two.nats, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SYSTEMS)
def test_run_to_folder_to_transformers_to_folder_to_esolm(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", name, **SYSTEMS[name])
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    lm = esolm.load(run)
    found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert type(found) is type(transformers.AutoModel.from_pretrained(tmp_path / "out")) is hf.EsoLMForMaskedLM
    expected = lm.system.logits(lm.net, Batch(masked()))
    torch.testing.assert_close(
        found(masked()).logits, expected, rtol=1e-4, atol=1e-5
    )  # unaligned weights round otherwise
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found.save_pretrained(tmp_path / "again")
    words.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again(masked()).logits, expected, rtol=1e-4, atol=1e-5)
    assert same_weights(found.net, lm.net)
    assert same_weights(again.net, lm.net)
    for folder in ("out", "again"):
        back = esolm.load(tmp_path / folder)
        assert dataclasses.asdict(back.system) == dataclasses.asdict(lm.system)
        assert back.net.config == lm.net.config
        assert same_weights(back.net, lm.net)
        assert back.sample(num_samples=3, seed=5).texts == lm.sample(num_samples=3, seed=5).texts


def test_tokenizers_agree(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "mdlm")
    cli.main(["export", str(run), str(tmp_path / "out")])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Ein Übermaß, 3 < 4"
    assert words(text)["input_ids"] == BYTES.encode(text)
    assert words.decode(BYTES.encode(text)) == text
    assert (words.mask_token_id, words.eos_token_id) == (BYTES.mask_id, BYTES.eos_id)
    assert words.pad_token_id == BYTES.mask_id
    assert words.is_fast
    assert set(words(text)) == {"input_ids", "attention_mask"}


def test_the_card_describes_the_model_and_its_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", "esolm", alpha_0=0.25)
    cli.main(["export", str(run), str(tmp_path / "model-1")])
    card = (tmp_path / "model-1" / "README.md").read_text()
    for words in ("`esolm`, alpha_0 = 0.25", "| steps | 1 |", "bytes, 258 ids", "8 tokens", "not measured"):
        assert words in card
    assert esolm.load(tmp_path / "model-1").system.alpha_0 == 0.25
    monkeypatch.chdir(tmp_path)
    run_snippets(card)


def run_snippets(card: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", card, re.S)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(snippet, {})


@pytest.mark.parametrize("name", toy.one_of_each())
def test_the_card_names_the_folder_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make_run(tmp_path / "run", name, **toy.one_of_each()[name])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "run", "models/deep/mine"]) == 0
    card = Path("models/deep/mine/README.md").read_text()
    assert 'esolm.load("models/deep/mine")' in card
    run_snippets(card)


def test_the_card_of_a_system_outside_the_package_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", "support.foreign.FixedRate")
    assert foreign.FixedRate.__module__ in sys.modules
    assert cli.main(["export", "run", "mine"]) == 0
    card = Path("mine/README.md").read_text()
    assert card.count("import support.foreign") == 2
    run_snippets(card)


def test_the_card_of_the_bundled_model_runs_and_is_what_make_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = PACKAGED / "stories"
    card = (folder / "README.md").read_text("utf-8")
    run_snippets(card)
    own = report.card(document.Results(spec.read(Path(__file__).parents[2] / "experiments"), "stories"))
    assert card == export.card(esolm.load("stories"), export.describe(folder, "ema", "best"), folder) + own


def test_the_licence_is_in_the_metadata_and_stays_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "esolm", alpha_0=0.25)
    for source, name, options, expected in ((run, "a", [], None), (run, "b", ["--license", "mit"], "mit"),
                                            (tmp_path / "b", "c", [], "mit")):  # fmt: skip
        assert cli.main(["export", str(source), str(tmp_path / name), *options]) == 0
        front = (tmp_path / name / "README.md").read_text().split("---\n")[1]
        assert yaml.safe_load(front).get("license") == expected
    assert cli.main(["export", str(run), str(tmp_path / "d"), "--only_adapter", "--license", "mit"]) == 2
    assert "license" in capsys.readouterr().err


def test_an_export_of_a_conversion_keeps_its_origin(tmp_path: Path) -> None:
    cli.main(["convert", str(GOLDEN / "lightning_tiny.ckpt"), str(tmp_path / "a")])
    assert cli.main(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "converted from | `lightning_tiny.ckpt`" in (tmp_path / "b" / "README.md").read_text()
    a, b = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
    assert a == b
    assert describe(tmp_path / "b") == {**describe(tmp_path / "a"), "path": str(tmp_path / "b")}
    assert describe(tmp_path / "b")["parameters"] == 144_562
    assert cli.main(["export", str(tmp_path / "none"), str(tmp_path / "c")]) == 2
    assert cli.main(["export", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert not (tmp_path / "c").exists()


def test_a_given_order_gives_the_authors_logits(tmp_path: Path) -> None:
    cli.main(["convert", str(GOLDEN / "lightning_tiny.ckpt"), str(tmp_path / "a")])
    found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "a")
    released = load_file(GOLDEN / "state_dict.safetensors")
    from esolm.interop.released import our_name

    weights = {our_name(name.removeprefix("backbone.")): t for name, t in released.items() if "rotary" not in name}
    found.net.load_state_dict(weights)
    golden = load_file(GOLDEN / "diffusion.safetensors")
    sigma, expected = golden["sort_idx"], golden["logits_B_causal"]
    expected = torch.empty_like(expected).scatter_(1, sigma[..., None].expand_as(expected), expected)
    torch.testing.assert_close(found(golden["xt"], sigma=sigma).logits, expected, rtol=1e-4, atol=1e-4)


def test_logits_predict_the_token_at_their_position() -> None:
    x = toy.text(3, L, 90)
    ar = model("ar")
    nats = ar.system.terms(ar.net, Batch(x), Randomness(0), False)[0].nats
    found = ar.system.logits(ar.net, Batch(x))
    found[..., BYTES.mask_id] = -torch.inf
    torch.testing.assert_close(-found.log_softmax(-1).gather(2, x[..., None])[..., 0], nats, rtol=1e-4, atol=1e-5)
    eso, z = model("esolm", loss="any_order"), x.clone()
    z[:, 3:] = BYTES.mask_id
    found = eso.system.logits(eso.net, Batch(z))
    found[..., BYTES.mask_id] = -torch.inf
    sigma = torch.arange(L).expand_as(x)
    expected = eso.system.order_nats(eso.net, Batch(x), sigma)[:, 3]
    torch.testing.assert_close(-found.log_softmax(-1)[:, 3].gather(1, x[:, 3:4])[:, 0], expected, rtol=1e-4, atol=1e-5)
    bd3, z = model("bd3lm"), x.clone()
    z[:, 4:] = BYTES.mask_id
    both = bd3.net(torch.cat([z, x], 1), torch.arange(L).repeat(2)[None], block(L, 4))[:, 4:L]
    torch.testing.assert_close(bd3.system.logits(bd3.net, Batch(z))[:, 4:], both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in SYSTEMS),
        ("esolm", {"variant": "A"}),
        ("esolm", {"loss": "any_order"}),
        ("esolm", {"query": "shift"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_not_seen(name: str, options: dict[str, str], side: str) -> None:
    if (name, side) == ("bd3lm", "left"):
        pytest.skip("blocks are counted from the first token")
    lm, x = model(name, **options), masked()
    valid = torch.ones_like(x)
    valid[1, slice(4, None) if side == "right" else slice(0, 4)] = 0
    for pad in (7, 9):
        y = torch.where(valid.bool(), x, pad)
        found = hf.wrap(lm)(y, attention_mask=valid).logits
        if pad == 7:
            first = found
    torch.testing.assert_close(found[valid.bool()], first[valid.bool()], rtol=1e-5, atol=1e-6)
    if side == "right":
        torch.testing.assert_close(found[1, :4], lm.system.logits(lm.net, Batch(x[1:2, :4]))[0], rtol=1e-4, atol=1e-5)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", SYSTEMS)
def test_trainer_trains_it(tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    texts = ["ababab" * 2, "babab", "abab", "bababababa"] * 4
    cli.main(["export", str(make_run(tmp_path / "run", name, **SYSTEMS[name])), str(tmp_path / "out")])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    start = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    encoded = [words(text, truncation=True, max_length=L, padding="max_length") for text in texts]
    rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in encoded]
    if name == "mdlm":
        rows = pytest.importorskip("datasets").Dataset.from_list(rows)
    arguments = transformers.TrainingArguments(
        str(tmp_path / "trainer"), max_steps=6, per_device_train_batch_size=4, learning_rate=0.01, report_to=[],
        logging_steps=1, use_cpu=True, disable_tqdm=True, save_strategy="no", seed=3, prediction_loss_only=True,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    trainer = transformers.Trainer(
        model=start, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before
    assert trainer.evaluate()["eval_loss"] == after
    trainer.save_model(str(tmp_path / "tuned"))
    words.save_pretrained(tmp_path / "tuned")
    assert len(esolm.load(tmp_path / "tuned").sample(num_samples=2).texts) == 2


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_collator_leaves_every_real_eos_to_learn(tmp_path: Path, name: str) -> None:
    """All 8 EOS of 8 texts of different length are scored, and the loss is the library's own."""
    cli.main(["export", str(make_run(tmp_path / "run", name, **SYSTEMS[name])), str(tmp_path / "out")])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    ids = [[*b"abcdefg"[: 1 + i % 7], BYTES.eos_id] for i in range(8)]
    collator = transformers.DataCollatorForLanguageModeling(words, mlm=False, pad_to_multiple_of=4)
    batch = dict(collator([{"input_ids": row} for row in ids]))
    assert int((batch["labels"] == BYTES.eos_id).sum()) == 8
    lengths = torch.tensor([len(row) for row in ids])[:, None]
    valid = torch.arange(batch["input_ids"].shape[1]) < lengths
    x = torch.where(valid, batch["input_ids"], 0)
    terms = found.system.terms(found.net, Batch(x, valid), Randomness(fold(0, "trainer"), 0, 8), False)
    expected = sum(term.nats.sum() / term.valid.sum() for term in terms)
    torch.testing.assert_close(found(**batch).loss, expected)
    del batch["attention_mask"]  # a mask with label -100 is padding too
    torch.testing.assert_close(found(**batch).loss, expected)


def test_a_folder_that_pads_with_eos_still_loads_and_can_be_exported_again(tmp_path: Path) -> None:
    old = GOLDEN / "recorded" / "old_model"
    words = transformers.AutoTokenizer.from_pretrained(old)
    assert words.pad_token_id == words.eos_token_id
    assert transformers.AutoModelForMaskedLM.from_pretrained(old)(masked()).logits.shape == (3, L, BYTES.vocab_size)
    assert cli.main(["export", str(old), str(tmp_path / "new")]) == 0
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert words.pad_token_id == words.mask_token_id != words.eos_token_id


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    found = hf.wrap(model("mdlm"))
    x = masked()
    with pytest.raises(ValueError, match="mlm=False"):
        found(x, labels=x)
    with pytest.raises(ValueError, match=r"sigma .* mdlm"):
        found(x, sigma=toy.permutations(3, L))
    with pytest.raises(ValueError, match="block_size"):
        hf.wrap(model("bd3lm"))(x[:, :5])
    assert found(x, return_dict=False)[0].shape == (3, L, BYTES.vocab_size)
    config = found.config.to_dict()
    config["system"] = {"name": "antigravity.Class"}
    with pytest.raises(ValueError, match="import antigravity"):
        hf.EsoLMForMaskedLM(hf.EsoLMConfig.from_dict(config))


def test_default_order_and_gradient_checkpointing() -> None:
    lm = model("esolm", loss="any_order")
    found, x = hf.wrap(lm), masked()
    sigma = order.sort(order.groups(x == BYTES.mask_id, None, None), torch.arange(L)[None] / L)
    assert torch.equal(found(x).logits, found(x, sigma=sigma).logits)
    found.gradient_checkpointing_enable()
    assert found.net.checkpoint_blocks
    found.gradient_checkpointing_disable()
    assert not found.net.checkpoint_blocks
