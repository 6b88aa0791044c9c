"""What is scored, and that its value depends on nothing but the model, the texts and the seed.

Shapes: n sequences, L length, K orders.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from esolm.core.batch import Batch
from esolm.data import Manifest, prepare, tokenizer
from esolm.likelihood import estimators
from esolm.likelihood import scoring as evaluate
from esolm.likelihood.orders import weigh
from esolm.likelihood.texts import Sequences, read
from esolm.model import LanguageModel
from support import toy

L = 8
BYTES = tokenizer("bytes")
EOS, MASK = BYTES.eos_id, BYTES.mask_id
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
TEXT = "It was the best of times, it was the wörst of times – 諸行無常, it was the age of wisdom.\n"


def model(name: str = "esolm", length: int = L, **options: Any) -> LanguageModel:
    system = toy.make(name, MASK, **options)
    return LanguageModel(toy.fitting(system, BYTES.vocab_size, length), system, BYTES)


def texts(n: int = 7, padded: bool = False, given: bool = False) -> Sequences:
    x = toy.text(n, L, 200)
    valid = toy.padding(n, L) if padded else None
    kept = (torch.arange(L) < 2).expand(n, -1) if given else None
    if kept is not None and valid is not None:
        kept = kept & valid & (valid.sum(1, keepdim=True) > 2)
    return Sequences("texts", Batch(x, valid, kept), 50)


def weighed(lm: LanguageModel, sequences: Sequences, num_orders: int, **options: Any) -> torch.Tensor:
    return weigh(lm.net, lm.system, sequences.batch, num_orders, **options)


# Reading


def reading(lm: LanguageModel, spec: str, **options: Any) -> Sequences:
    return read(spec, lm.tokenizer, lm.net.config.length, **options)


def test_a_file_is_read_to_its_last_byte(tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    found = reading(model(), str(file))
    ids = [*TEXT.encode(), EOS]
    assert found.batch.x[found.batch.valid].tolist() == ids if found.batch.valid is not None else False
    assert found.batch.x.shape == (math.ceil(len(ids) / L), L)
    assert (found.bytes, int(found.tokens.sum())) == (len(TEXT.encode()), len(ids))
    assert found.batch.given is None
    longer = reading(model(), str(file), length=len(ids))
    assert (longer.batch.x.shape, longer.batch.valid) == ((1, len(ids)), None)
    assert reading(model(), f"text:{file}").sha256 == found.sha256


def test_documents_are_joined_by_eos(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"text": "zwei"}, {"text": "trois"}]
    (file := tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = reading(model(), str(file))
    assert found.batch.x.flatten().tolist()[:15] == [*b"one", EOS, *b"zwei", EOS, *b"trois", EOS]
    assert found.bytes == 12
    other = [{"body": "one"}]
    (tmp_path / "b.jsonl").write_text(json.dumps(other[0]))
    assert reading(model(), str(tmp_path / "b.jsonl"), field="body").bytes == 3
    (tmp_path / "c.txt").write_text("a <unk> b")
    assert reading(model(), str(tmp_path / "c.txt"), detokenizer="ptb").bytes == 5


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_a_limit_counts_the_bytes_of_what_is_used(tmp_path: Path, spec: str) -> None:
    (file := tmp_path / "a.txt").write_text(TEXT * 9, encoding="utf-8")
    made = tokenizer(spec, [TEXT * 9])
    lm = dataclasses.replace(model(), tokenizer=made)
    for count in (1, 2, 5):
        found = reading(lm, str(file), num_sequences=count)
        assert found.batch.x.shape == (count, L)
        assert found.batch.valid is None
        assert (
            abs(found.bytes - len(made.decode(found.batch.x.flatten().tolist()).encode())) <= 3
        )  # a character cut in two
    assert reading(lm, str(file), num_sequences=10**6).bytes == 9 * len(TEXT.encode())


def test_prepared_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 30, encoding="utf-8")
    (tmp_path / "b.txt").write_text(TEXT[:40] * 8, encoding="utf-8")
    made = {"tokenizer": "bytes", "length": L, "valid": f"text:{tmp_path}/b.txt"}
    manifest = prepare(f"text:{tmp_path}/a.txt", tmp_path / "data", **made)
    found = reading(model(), str(tmp_path / "data"))
    assert len(found) == manifest.splits["valid"].sequences
    assert found.bytes == manifest.splits["valid"].bytes
    assert found.batch.valid is None
    part = reading(model(), str(tmp_path / "data"), num_sequences=3)
    assert torch.equal(part.batch.x, found.batch.x[:3])
    assert part.bytes == len((TEXT[:40] * 8).encode()[:24])
    assert len(reading(model(), str(tmp_path / "data"), split="train")) == manifest.splits["train"].sequences
    for options, words in [({"length": 5}, "length is 5"), ({"split": "test"}, "no split 'test'")]:
        with pytest.raises(ValueError, match=words):
            reading(model(), str(tmp_path / "data"), **options)
    with pytest.raises(ValueError, match="give --length 8"):
        reading(model(length=4), str(tmp_path / "data"))
    assert reading(model(length=4), str(tmp_path / "data"), length=8).batch.x.shape[1] == 8
    other = dataclasses.replace(model(), tokenizer=tokenizer("bpe:260", [TEXT]))
    with pytest.raises(ValueError, match="made by tokenizer bytes"):
        reading(other, str(tmp_path / "data"))


def test_prepared_pairs_and_padding(tmp_path: Path) -> None:
    """Given prompts are seen and not scored, padding neither."""
    lines = [{"prompt": "ab", "target": "cd"}, {"prompt": "e", "target": "f"}] * 30
    (file := tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (train := tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "g", "target": "hi"}))
    spec, made = f"text:{train}", {"tokenizer": "bytes", "length": L, "valid": f"text:{file}"}
    prepare(spec, tmp_path / "pairs", packing="conditional", target_length=4, **made)
    pairs = reading(model(), str(tmp_path / "pairs"), num_sequences=2)
    assert pairs.batch.given is not None
    assert pairs.batch.given.sum(1).tolist() == [3, 2]  # with the separator
    assert pairs.tokens.tolist() == [5, 6]
    assert pairs.bytes == 3
    prepare(spec, tmp_path / "padded", packing="pad", field="target", **made)
    padded = reading(model(), str(tmp_path / "padded"), num_sequences=2)
    assert padded.tokens.tolist() == [3, 2]
    assert Manifest.load(tmp_path / "padded").packing == "pad"


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    for spec, options, words in [
        ("nothing.txt", {}, "'nothing.txt'"),
        ("text:nothing.txt", {}, "no file 'nothing.txt'"),
        (str(tmp_path / "empty.txt"), {}, "no text"),
        (str(tmp_path / "empty.txt"), {"num_sequences": 0}, "num_sequences is 0"),
        (str(tmp_path / "empty.txt"), {"length": 0}, "length is 0"),
        (str(tmp_path / "empty.txt"), {"detokenizer": "x"}, "no detokenizer 'x'"),
        ("pydocs", {"split": "test"}, "split is 'test'"),
    ]:
        with pytest.raises(ValueError, match=words):
            reading(model(), spec, **options)


# The bound


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("label", "name", "options"), toy.variants(), ids=lambda v: v if isinstance(v, str) else "")
def test_nelbo_does_not_depend_on_batches(label: str, name: str, options: dict[str, Any]) -> None:
    lm = model(name, **options)
    kinds = [texts(), texts(padded=True), texts(given=True)]
    for sequences in kinds:
        runs = [evaluate.nelbo(lm, sequences, 3, num_draws=2, batch_size=size) for size in (1, 5, 64)]
        for other in runs[1:]:
            torch.testing.assert_close(other.nats, runs[0].nats, **CLOSE)
        torch.testing.assert_close(torch.stack(list(runs[0].terms.values())).sum(0), runs[0].nats, **CLOSE)
        assert runs[0].nats.dtype == torch.float64
        drawn = runs[0].kind == "bound" and label != "bd3lm-1"  # whose every draw masks each token once
        assert torch.equal(runs[0].nats, evaluate.nelbo(lm, sequences, 4, 2, batch_size=1).nats) != drawn


def test_exact_where_nothing_is_drawn() -> None:
    for name, options in (("ar", {}), ("esolm", {"alpha_0": 0.0})):
        lm, sequences = model(name, **options), texts(padded=True)
        bound = evaluate.score(lm, sequences, "nelbo")
        assert bound.kind == "exact"
        for estimator in ("any-order", "iw", "jackknife"):
            found = evaluate.score(lm, sequences, estimator, num_orders=10, antithetic=True)
            assert (found.kind, found.num_orders, found.moved) == ("exact", 1, None)
            torch.testing.assert_close(found.nats, bound.nats, **CLOSE)
    assert evaluate.score(model(alpha_0=0.5), texts(), "nelbo").kind == "bound"
    given = evaluate.score(model(alpha_0=0.0), texts(given=True), "iw", num_orders=4)  # ascending: one order
    assert (given.kind, given.num_orders) == ("exact", 1)


def test_more_draws_are_the_mean_of_stratified_ones() -> None:
    """All draws of all sequences are one stratified set: the numbers of masks of 4 draws of 8 texts of length 8 cover
    1 .. 8 four times each."""
    lm = model("mdlm")
    seen: list[int] = []

    class Counting(type(lm.system)):  # type: ignore[misc]
        def terms(self, net: Any, batch: Batch, rng: Any, train: bool) -> Any:
            masked, _ = self.corrupt(batch.scored, rng, train)
            seen.extend(masked.sum(1).tolist())
            return super().terms(net, batch, rng, train)

    evaluate.nelbo(dataclasses.replace(lm, system=Counting(mask_id=MASK)), texts(8), num_draws=4, batch_size=5)
    assert sorted(seen) == sorted([*range(1, 9)] * 4)


# Orders


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("alpha_0", [1.0, 0.5])
def test_weights_do_not_depend_on_batches_and_can_be_extended(alpha_0: float, antithetic: bool) -> None:
    lm, calls = model(alpha_0=alpha_0), list[int]()
    for sequences in (texts(), texts(padded=True), texts(padded=True, given=True)):
        calls.clear()
        whole = weighed(lm, sequences, 12, seed=1, antithetic=antithetic, batch_size=5)
        assert whole.shape == (7, 12)
        torch.testing.assert_close(
            weighed(lm, sequences, 12, seed=1, antithetic=antithetic, batch_size=64), whole, **CLOSE
        )
        known = whole[:, :8].clone()
        known[2, 5] = math.nan
        again = weigh(
            lm.net,
            lm.system,
            sequences.batch,
            12,
            seed=1,
            antithetic=antithetic,
            known=known,
            keep=lambda m: calls.append(1),
        )
        torch.testing.assert_close(again, whole, **CLOSE)
        assert 0 < len(calls) < 12
        fewer = weigh(
            lm.net,
            lm.system,
            sequences.batch,
            4,
            seed=1,
            antithetic=antithetic,
            known=whole,
            keep=lambda m: calls.clear(),
        )
        assert torch.equal(fewer, whole[:, :4])
        assert calls
    assert not torch.equal(weighed(lm, texts(), 4, seed=2), weighed(lm, texts(), 4, seed=3))


def test_estimates_from_weights() -> None:
    lm, sequences = model(alpha_0=1.0), texts(padded=True)
    log_w = weighed(lm, sequences, 20)
    found = {name: evaluate.from_weights(log_w, sequences, name) for name in ("any-order", "iw", "jackknife")}
    torch.testing.assert_close(found["any-order"].nats, -log_w.mean(1), **CLOSE)
    torch.testing.assert_close(found["iw"].nats, estimators.bound(log_w), **CLOSE)
    torch.testing.assert_close(found["jackknife"].nats, estimators.jackknife(log_w), **CLOSE)
    assert {name: score.kind for name, score in found.items()} == {
        "any-order": "bound", "iw": "bound", "jackknife": "estimate"
    }  # fmt: skip
    record = found["iw"].record()
    assert [row["num_orders"] for row in record["curve"]] == [1, 10, 20]
    tokens = sequences.tokens.sum().item()
    assert record["curve"][0]["bound"] == pytest.approx(-log_w.mean(1).sum().item() / tokens)
    assert record["curve"][-1]["bound"] == pytest.approx(record["nats"])
    assert record["curve"][-1]["bound_stderr"] == pytest.approx(record["stderr"])
    halves = [estimators.bound(part).sum() for part in (log_w[:, :10], log_w[:, 10:])]
    moved = (sum(halves) / 2 - estimators.bound(log_w).sum()).item() / tokens
    assert record["moved"] == pytest.approx(moved)
    assert record["moved"] > 0
    json.dumps(record, allow_nan=False)
    paired = evaluate.score(lm, sequences, "jackknife", 20, antithetic=True)
    torch.testing.assert_close(
        paired.nats, estimators.jackknife(weighed(lm, sequences, 20, antithetic=True), 2), **CLOSE
    )


def test_units_of_a_record() -> None:
    sequences = texts(padded=True)
    nats = sequences.tokens * 2
    record = evaluate.TextScore("c", "nelbo", "bound", nats, sequences.tokens, 50, {"x": nats}).record()
    tokens = int(sequences.tokens.sum())
    assert (record["tokens"], record["sequences"], record["terms"]) == (tokens, 7, {"x": 2})
    assert record["perplexity"] == pytest.approx(math.exp(2))
    assert record["bits_per_token"] == pytest.approx(2 / math.log(2))
    assert record["bits_per_byte"] == pytest.approx(2 * tokens / 50 / math.log(2))
    assert record["stderr"] == pytest.approx(0, abs=1e-12)
    assert (record["num_orders"], record["curve"], record["moved"]) == (None, [], None)
    alone = evaluate.TextScore("c", "nelbo", "bound", nats[:1], sequences.tokens[:1], 0, {}).record()
    assert (alone["stderr"], alone["bits_per_byte"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "name", "options"),
    [
        ("no estimator 'elbo'", "esolm", {"estimator": "elbo"}),
        ("num_draws is 0", "esolm", {"num_draws": 0}),
        ("num_orders is 0", "esolm", {"estimator": "iw", "num_orders": 0}),
        ("batch_size 0", "esolm", {"estimator": "iw", "batch_size": 0}),
        ("num_orders is 5", "esolm", {"estimator": "iw", "num_orders": 5, "antithetic": True}),
        ("jackknife needs at least 2", "esolm", {"estimator": "jackknife", "num_orders": 1}),
        ("jackknife needs at least 4", "esolm", {"estimator": "jackknife", "num_orders": 2, "antithetic": True}),
        ("bd3lm has no likelihood", "bd3lm", {"estimator": "iw"}),
    ],
)
def test_wrong_requests(words: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate.score(model(name), texts(), **options)


def test_variant_a_has_its_bound_only() -> None:
    lm = model(variant="A", alpha_0=0.5)
    assert evaluate.score(lm, texts()).kind == "bound"
    with pytest.raises(ValueError, match="nelbo"):
        evaluate.score(lm, texts(), "iw")


def test_damaged_weights_are_found() -> None:
    lm = model()
    torch.nn.init.constant_(lm.net.head.bias, math.nan)
    with pytest.raises(ValueError, match="not finite"):
        evaluate.score(lm, texts(), "iw", 2)


def test_log_prob_and_score_are_one_engine() -> None:
    """The same seed draws the same orders, so the numbers are the same, padded rows included."""
    lm = model(alpha_0=0.5)
    sequences = texts(5, padded=True)
    rows = [row[kept].tolist() for row, kept in zip(sequences.batch.x, sequences.batch.valid)]  # type: ignore[arg-type]
    for estimator in ("iw", "jackknife"):
        score = evaluate.score(lm, sequences, estimator, num_orders=4, seed=7, batch_size=2)
        found = lm.log_prob(rows, num_orders=4, estimator=estimator, seed=7, batch_size=3)
        torch.testing.assert_close(-found.total, score.nats, **CLOSE)
