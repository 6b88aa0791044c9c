"""What every system promises, over every name in the package; a new system is covered as soon as it exists.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esolm import systems
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import Term, token_nats, total
from esolm.net.denoiser import Denoiser
from support import toy

B, L, V = 6, toy.LENGTH, 5
MASK = V - 1
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
DETERMINISTIC = {(label, train) for label in ("ar", "esolm-B-0", "esolm-shift-0") for train in (True, False)}
DETERMINISTIC |= {("bd3lm-1", False)}
"""(label, train) of the losses that draw nothing that matters."""


@pytest.fixture(params=toy.variants(), ids=lambda v: v[0])
def variant(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    return request.param


@pytest.fixture
def found(variant: tuple[str, str, dict[str, Any]]) -> Any:
    _, name, options = variant
    return toy.make(name, MASK, **options)


@pytest.fixture(params=["paper", "llama"])
def net(request: pytest.FixtureRequest, found: Any) -> Denoiser:
    return toy.fitting(found, V, **toy.SHAPES[request.param])


@pytest.fixture(params=[True, False], ids=["train", "bound"])
def train(request: pytest.FixtureRequest) -> bool:
    return request.param


def rng(key: int = 7, first: int = 0, batch: int = B) -> Randomness:
    return Randomness(key, first, batch)


def holes(seed: int = 0) -> Tensor:
    """Valid tokens with padding on the left, on the right, inside, nowhere and (nearly) everywhere."""
    valid = torch.rand(B, L, generator=torch.Generator().manual_seed(seed)) < 0.7
    place = torch.arange(L)
    valid[0], valid[1], valid[2], valid[3] = True, place < 5, place >= 3, place == 4
    valid[4:, 1] = True
    return valid


def prompt() -> Tensor:
    """Given tokens: prefixes of several lengths, one of them everything."""
    return torch.arange(L) < torch.tensor([0, 1, 3, 4, 7, 8])[:, None]


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], **CLOSE)


def is_cross_entropy(found: Any, train: bool, **kept: Tensor) -> bool:
    """Whether nats are multiples of -log p, by a network that gives every position the same p. They are not where the
    model also says when a mask goes."""
    net, pi = toy.fitting(found, V), torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
    with torch.no_grad():
        net.head.weight.zero_()
        net.head.bias.copy_(pi.clamp_min(1e-9).log())
    for token, p in enumerate(pi[:MASK]):
        x = torch.full((B, L), token)
        weights = toy.weights(found, net, x, rng(), train, **kept)
        nats = toy.values(found, net, x, rng(), train, **kept)
        if not all(torch.allclose(nats[name], -weight * p.log()) for name, weight in weights.items()):
            return False
    return True


def test_the_nats_of_few_systems_are_no_cross_entropies() -> None:
    """The tests above and below would otherwise check nothing."""
    labels = {
        label
        for label, name, options in toy.variants()
        if (made := toy.make(name, MASK, **options)).masks and not is_cross_entropy(made, False)
    }
    assert labels == {"sedd-absorb", "diffusionbert"}


def test_a_system_is_a_frozen_dataclass_of_options() -> None:
    assert {"ar", "bd3lm", "esolm", "mdlm"} <= set(systems.names())
    for name in systems.names():
        cls = systems.find(name)
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen
        assert "mask_id" in {f.name for f in dataclasses.fields(cls)}
        assert systems.find(f"{cls.__module__}.{cls.__name__}") is cls
        assert cls(mask_id=3).name == name


@pytest.mark.parametrize("name", ["nothing", "esolm.nothing.System", "esolm.systems.names", "esolm.systems.ar.Nothing"])
def test_an_unknown_system_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        systems.find(name)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kept", [{}, {"valid": holes()}, {"given": prompt()}, {"valid": holes(), "given": prompt()}])
def test_terms_are_finite_and_counted(net: Denoiser, found: Any, train: bool, kept: dict[str, Tensor]) -> None:
    """Nats are zero outside what a term is about, and counts() says in training how much that is."""
    x, scored = toy.text(B, vocab_size=V), torch.ones(B, L, dtype=torch.bool)
    scored = scored & kept.get("valid", scored) & ~kept.get("given", ~scored)
    terms = found.terms(net, Batch(x, kept.get("valid"), kept.get("given")), rng(), train)
    assert len({term.name for term in terms}) == len(terms) > 0
    for term in terms:
        assert isinstance(term, Term)
        assert term.nats.shape == term.valid.shape
        assert term.nats.shape[1] == L
        assert term.nats.isfinite().all()
        assert (term.nats >= 0).all()
        assert not term.nats[~term.valid].any()
        assert term.nats.any()
    if train:
        counts = found.counts(scored, rng())
        assert counts == {term.name: int(term.valid.sum()) for term in terms}
        shares = [n for n in counts.values() if 0 < n < int(scored.sum())]
        assert not shares or sum(shares) == int(scored.sum())  # terms are about all tokens, or deal them out
        expected = sum(term.nats.sum() / counts[term.name] for term in terms)
        torch.testing.assert_close(total(terms, counts), expected, **CLOSE)
    else:
        assert all(torch.equal(term.valid, scored) for term in terms)


def test_gradients_reach_every_parameter(net: Denoiser, found: Any) -> None:
    x = toy.text(B, vocab_size=V)
    loss = total(found.terms(net, Batch(x), rng(), True), found.counts(torch.ones_like(x).bool(), rng()))
    loss.backward()
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.any(), name


@pytest.mark.matrix(3)
def test_the_same_key_gives_the_same_terms(net: Denoiser, variant: tuple, found: Any, train: bool) -> None:
    x = toy.text(B, vocab_size=V)
    first = toy.values(found, net, x, rng(), train)
    torch.manual_seed(99)  # the global generator plays no part
    again = toy.values(found, net, x, rng(), train)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = toy.values(found, net, x, rng(8), train)
    alike = all((first[name] - other[name]).abs().max() < 1e-12 for name in first)
    assert alike == ((variant[0], train) in DETERMINISTIC)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 2, 2), (5, 1)])
def test_a_batch_in_pieces_is_the_same_batch(net: Denoiser, found: Any, train: bool, sizes: tuple[int, ...]) -> None:
    """Micro-batches and ranks: every example gets the masks and orders that it has in the whole."""
    x, valid, given = toy.text(B, vocab_size=V), holes(), prompt()
    whole = toy.values(found, net, x, rng(), train, valid=valid, given=given)
    parts: dict[str, list[Tensor]] = {name: [] for name in whole}
    counts: Counter[str] = Counter()
    first = 0
    for size in sizes:
        at = slice(first, first + size)
        place = Randomness(7, first, B)
        for name, nats in toy.values(found, net, x[at], place, train, valid=valid[at], given=given[at]).items():
            parts[name].append(nats)
        counts.update(found.counts((valid & ~given)[at], place))
        first += size
    same(whole, {name: torch.cat(nats) for name, nats in parts.items()})
    assert counts == found.counts(valid & ~given, rng())


@pytest.mark.matrix(3)
def test_the_target_is_not_seen(net: Denoiser, variant: tuple, found: Any, train: bool) -> None:
    """The nats of a token, over all values it may have with the rest and the draws fixed, are those of a distribution
    over the vocabulary without the mask: sum exp(-nats / weight) = 1. A network that saw the token it predicts would
    give each of its values another distribution. (Under noise that leaves no masks, the nats depend on what the noise
    put there; test_uniform.py, test_steps.py and test_vectors.py have the exact statements.)"""
    x, kept = toy.text(B, vocab_size=V), {"valid": holes(), "given": prompt()}
    if not found.masks or not is_cross_entropy(found, train, **kept):
        return
    weights = toy.weights(found, net, x, rng(), train, **kept)
    in_bound = {term.name for term in found.terms(net, Batch(x), rng(), False)}
    weights = {name: weight for name, weight in weights.items() if name in in_bound}  # others may be about seen tokens
    checked = 0
    with torch.no_grad():
        for at in range(L):
            mass = {name: torch.zeros_like(w[:, at]) for name, w in weights.items()}
            for value in range(V - 1):
                changed = x.clone()
                changed[:, at] = value
                nats_of = toy.values(found, net, changed, rng(), train, **kept)
                for name, nats in ((name, nats_of[name]) for name in weights):
                    mass[name] += torch.exp(-nats[:, at] / weights[name][:, at].clamp_min(1e-30))
            for name, w in weights.items():
                scored = w[:, at] > 0
                checked += int(scored.sum())
                torch.testing.assert_close(mass[name][scored], torch.ones_like(mass[name][scored]), **CLOSE)
    assert checked > 5


def test_the_mask_has_no_probability(net: Denoiser, found: Any, train: bool) -> None:
    """However much the network likes it: its logit changes no term."""
    x = toy.text(B, vocab_size=V)
    if net.head.bias is None:
        net.head.bias = nn.Parameter(torch.zeros(V, dtype=torch.float64))
    before = toy.values(found, net, x, rng(), train)
    with torch.no_grad():
        net.head.bias[MASK] += 50
    same(before, toy.values(found, net, x, rng(), train))
    with torch.no_grad():
        net.head.bias[0] += 10  # while another's does
    after = toy.values(found, net, x, rng(), train)
    assert any((before[name] - after[name]).abs().max() > 0.01 for name in before)


@pytest.mark.matrix(3)
def test_padding_is_neither_seen_nor_scored(net: Denoiser, found: Any, train: bool) -> None:
    x, valid = toy.text(B, vocab_size=V), holes()
    before = toy.values(found, net, x, rng(), train, valid=valid)
    for shift in (1, 2):
        noise = torch.where(valid, x, (x + shift) % MASK)
        after = toy.values(found, net, noise, rng(), train, valid=valid)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_padding_on_the_right_is_a_shorter_text(net: Denoiser, found: Any, train: bool) -> None:
    x, short = toy.text(B, vocab_size=V), 4
    if "block_size" in {field.name for field in dataclasses.fields(found)}:
        return  # times are dealt to the blocks, and a shorter text has fewer
    valid = (torch.arange(L) < short).expand(B, -1)
    padded = toy.values(found, net, x, rng(), train, valid=valid)
    same(toy.values(found, net, x[:, :short], rng(), train), {k: v[:, :short] for k, v in padded.items()})


@pytest.mark.matrix(3)
def test_all_valid_and_nothing_given_are_the_defaults(net: Denoiser, found: Any, train: bool) -> None:
    x, every = toy.text(B, vocab_size=V), torch.ones(B, L, dtype=torch.bool)
    default = toy.values(found, net, x, rng(), train)
    same(default, toy.values(found, net, x, rng(), train, valid=every))
    same(default, toy.values(found, net, x, rng(), train, given=~every))
    same(default, toy.values(found, net, x, rng(), train, valid=every, given=~every))


@pytest.mark.matrix(3)
def test_given_tokens_are_seen_and_never_scored(net: Denoiser, found: Any, train: bool) -> None:
    """Wherever they stand they have no nats; as a prefix they change those of what follows."""
    x = toy.text(B, vocab_size=V)
    anywhere = torch.rand(B, L, generator=torch.Generator().manual_seed(3)) < 0.5
    for name, nats in toy.values(found, net, x, rng(), train, given=anywhere).items():
        rows = nats.shape[0]
        assert rows == B or train
        if rows == B:
            assert not nats[anywhere].any(), name
    prefix = (torch.arange(L) < 2).expand(B, -1)
    before = toy.values(found, net, x, rng(), train, given=prefix)
    other = x.clone()
    other[:, 0] = (other[:, 0] + 1) % MASK
    after = toy.values(found, net, other, rng(), train, given=prefix)
    for name in before:
        assert not before[name][:, :2].any()
    changes = [((before[name] - after[name]).abs() > 1e-9, before[name] != 0) for name in before]
    seen = [(changed, nats) for changed, nats in changes if changed.any()]  # of some terms the network has no part
    assert seen
    assert all(torch.equal(changed, nats) for changed, nats in seen)


def test_token_nats_are_those_of_the_vocabulary_without_the_mask() -> None:
    logits = torch.randn(3, V)
    for target in range(V - 1):
        nats = token_nats(logits, torch.full((3,), target), MASK)
        expected = logits[:, :MASK].logsumexp(-1) - logits[:, target]
        torch.testing.assert_close(nats, expected)
    assert token_nats(logits, torch.full((3,), MASK), MASK).isinf().all()
    assert token_nats(logits.bfloat16(), torch.zeros(3).long(), MASK).dtype == torch.float32


def test_no_counted_token_is_no_division_by_zero() -> None:
    nothing = Term("a", torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert total([nothing], {"a": 0}).item() == 0
