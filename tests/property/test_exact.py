"""Each loss, value by value, from the draws behind it: the same masks and orders through the naive network.

The draws are read from the counters (that they are the right distribution is the business of test_bounds.py); what is
done with them is written anew from the paper, one sequence at a time.

Shapes: B batch, L length.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core.randomness import Randomness
from esolm.net.denoiser import Denoiser
from support import paper, toy

B, L, V = 6, 6, 5
MASK = V - 1
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
X = toy.text(B, L, V)
RNG = Randomness(31, 0, B)
EVERY = list(range(B))
BOS = 2
QUERIES: dict[str, dict[str, Any]] = {"mask": {}, "shift": {"query": "shift", "first": "bos", "bos_id": BOS}}
query = pytest.mark.parametrize("query", QUERIES)


@pytest.fixture(scope="module", params=["paper", "llama"])
def net(request: pytest.FixtureRequest) -> Denoiser:
    return toy.network(V, L, **toy.SHAPES[request.param])


def by_chance(u: Tensor, places: list[int]) -> list[int]:
    """Places in the order of their uniforms."""
    return sorted(places, key=lambda i: u[i].item())


def drawn(phase: Randomness, examples: list[int], rank: dict[int, int], total: int, train_t: bool) -> dict[str, Tensor]:
    """The uniforms of some examples: for masks, for the order, and the time of the example's stratum."""
    found = {name: phase.at(name).uniform(torch.tensor(examples), L) for name in ("mask", "order")}
    if train_t:
        found["t"] = phase.at("time").times(torch.tensor([rank[e] for e in examples]), total)[:, 0]
    return found


def diffusion(net: Denoiser, x: list[int], masked: list[bool], u: Tensor, variant: str, query: str) -> Tensor:
    """Nats of the masks of z_t, unweighted, under the pattern of (B) or of (A) in natural order."""
    if query == "shift":
        clean, masks = (by_chance(u, paper.positions(masked, kind)) for kind in (False, True))
        together = len(clean) if variant == "A" else 0
        return at(masks, x, paper.shifted_logits(net, x, clean, masks, MASK, BOS, True, together))
    sigma = by_chance(u, paper.positions(masked, False)) + by_chance(u, paper.positions(masked, True))
    seen = paper.diffusion_b(sigma) if variant == "B" else paper.diffusion_a(sigma, masked)
    out = paper.logits(net, [MASK if m else t for m, t in zip(masked, x)], range(L), seen)
    return double([paper.nats(out[i], x[i], MASK) if m else 0.0 for i, m in enumerate(masked)])


def at(positions: list[int], x: list[int], out: Tensor) -> Tensor:
    """Nats of some positions from their logits, zero elsewhere."""
    found = torch.zeros(L, dtype=torch.float64)
    for i, row in zip(positions, out):
        found[i] = paper.nats(row, x[i], MASK)
    return found


def sequential(net: Denoiser, x: list[int], masked: list[bool], u: Tensor, variant: str, query: str) -> Tensor:
    """Nats of the masks of z_0 by the 2L x 2L pattern in natural order; of shifted queries, by a pass for each."""
    if query == "shift":
        clean, masks = by_chance(u, paper.positions(masked, False)), paper.positions(masked, True)
        together = len(clean) if variant == "A" else 0
        passes = [
            paper.shifted_logits(net, x, clean + masks[:k], [i], MASK, BOS, together=together)
            for k, i in enumerate(masks)
        ]
        return at(masks, x, torch.cat(passes)) if masks else torch.zeros(L, dtype=torch.float64)
    sigma = by_chance(u, paper.positions(masked, False)) + paper.positions(masked, True)
    seen = paper.sequential_b(sigma, masked) if variant == "B" else paper.sequential_a(masked)
    for i in paper.positions(masked, False):
        seen[i, i] = True  # a clean z may see anything
    z = [MASK if m else t for m, t in zip(masked, x)]
    out = paper.logits(net, [*z, *x], [*range(L), *range(L)], seen)
    return double([paper.nats(out[i], x[i], MASK) if m else 0.0 for i, m in enumerate(masked)])


def smallest(u: Tensor, t: float) -> tuple[list[bool], float]:
    """The number of masks is 1 + floor(n t), of weight n/m; they are those with the smallest uniforms."""
    m = 1 + int(len(u) * t)
    chosen = by_chance(u, list(range(len(u))))[:m]
    return [i in chosen for i in range(len(u))], len(u) / m


def double(numbers: list) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@query
@pytest.mark.parametrize("variant", ["B", "A"])
@pytest.mark.parametrize("alpha_0", [1.0, 0.5])
def test_esolm_bound(net: Denoiser, variant: str, alpha_0: float, query: str) -> None:
    """Not training: both terms on every example, with the NELBO's weights."""
    made = toy.make("esolm", MASK, alpha_0=alpha_0, variant=variant, **QUERIES[query])
    found = toy.values(made, net, X, RNG, False)
    draws = drawn(RNG.at("diffusion"), EVERY, dict(zip(EVERY, EVERY)), B, True)
    expected = []
    for b in EVERY:
        t, u = draws["t"][b].item(), draws["mask"][b]
        if alpha_0 == 1:
            masked, weight = smallest(u, t)
        else:
            alpha_t = alpha_0 * (1 - t)
            masked, weight = [v >= alpha_t for v in u.tolist()], alpha_0 / (1 - alpha_t)
        expected.append(weight * diffusion(net, X[b].tolist(), masked, draws["order"][b], variant, query))
    torch.testing.assert_close(found["diffusion"], torch.stack(expected), **CLOSE)
    if alpha_0 < 1:
        check_sequential(net, found["sequential"], EVERY, alpha_0, variant, query)


def check_sequential(
    net: Denoiser, found: Tensor, examples: list[int], alpha_0: float, variant: str, query: str
) -> None:
    draws = drawn(RNG.at("sequential"), examples, {}, 0, False)
    expected = []
    for row, b in enumerate(examples):
        masked = [v >= alpha_0 for v in draws["mask"][row].tolist()]
        expected.append(sequential(net, X[b].tolist(), masked, draws["order"][row], variant, query))
    torch.testing.assert_close(found, torch.stack(expected), **CLOSE)
    assert found.any()


@pytest.mark.matrix(5)
@query
@pytest.mark.parametrize("variant", ["B", "A"])
@pytest.mark.parametrize(
    ("alpha_0", "kappa", "first", "weights"),
    [
        (0.5, 0.5, [1, 3, 5], "auto"),
        (0.5, 0.5, [1, 3, 5], "unit"),
        (0.5, 1 / 3, [2, 5], "auto"),
        (1.0, 0.5, EVERY, "auto"),
        (1.0, 0.5, EVERY, "elbo"),
        (0.0, 0.5, [], "auto"),
    ],
)
def test_esolm_in_training(
    net: Denoiser, variant: str, alpha_0: float, kappa: float, first: list[int], weights: str, query: str
) -> None:
    """Example g takes the diffusion term iff floor((g+1) kappa) > floor(g kappa); all do at alpha_0 = 1, none at 0.
    The weights are the NELBO's, but 1 at alpha_0 = 1 unless asked for."""
    options = {"variant": variant, "kappa": kappa, "weights": weights, "t_min": 0.1, **QUERIES[query]}
    made = toy.make("esolm", MASK, alpha_0=alpha_0, **options)
    found = toy.values(made, net, X, RNG, True)
    second = [b for b in EVERY if b not in first]
    assert set(found) == ({"diffusion"} if first else set()) | ({"sequential"} if second else set())
    if first:
        draws = drawn(RNG.at("diffusion"), first, {b: i for i, b in enumerate(first)}, len(first), True)
        expected = []
        for row, b in enumerate(first):
            t = draws["t"][row].item()
            if alpha_0 == 1 and weights == "elbo":
                t = 0.1 + 0.9 * t
            alpha_t = alpha_0 * (1 - t)
            unit = weights == "unit" or (alpha_0 == 1 and weights == "auto")
            masked = [v >= alpha_t for v in draws["mask"][row].tolist()]
            nats = diffusion(net, X[b].tolist(), masked, draws["order"][row], variant, query)
            expected.append(nats * (1.0 if unit else alpha_0 / (1 - alpha_t)))
        torch.testing.assert_close(found["diffusion"], torch.stack(expected), **CLOSE)
    if second:
        check_sequential(net, found["sequential"], second, alpha_0, variant, query)


@pytest.mark.matrix(3)
@query
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("alpha_0", [0.0, 0.5, 1.0, (0.0, 0.25, 1.0, 1.0)])
def test_any_order(net: Denoiser, alpha_0: Any, train: bool, query: str) -> None:
    """sigma from P_L^alpha_0, then a separate pass for every token; in training perhaps a mixture of alpha_0."""
    mixed = isinstance(alpha_0, tuple)
    options = {"alpha_0": 0.5, "mixture": alpha_0} if mixed else {"alpha_0": alpha_0}
    found = toy.values(toy.make("esolm", MASK, loss="any_order", **options, **QUERIES[query]), net, X, RNG, train)
    draws = drawn(RNG, EVERY, {}, 0, False)
    expected = torch.zeros(B, L, dtype=torch.float64)
    for b in EVERY:
        share = alpha_0[b % 4] if mixed and train else options["alpha_0"]
        masked = [v >= share for v in draws["mask"][b].tolist()]
        sigma = by_chance(draws["order"][b], paper.positions(masked, False)) + paper.positions(masked, True)
        for step, i in enumerate(sigma):
            x = X[b].tolist()
            if query == "mask":
                expected[b, i] = paper.query_nats(net, x, sigma, step, MASK)
            else:
                out = paper.shifted_logits(net, x, sigma[:step], [i], MASK, BOS)
                expected[b, i] = paper.nats(out[0], x[i], MASK)
    torch.testing.assert_close(found["any_order"], expected, **CLOSE)


def left_to_right(net: Denoiser) -> Tensor:
    """L separate passes: the clean prefix and one mask."""
    order = list(range(L))
    rows = [[paper.query_nats(net, x.tolist(), order, step, MASK) for step in order] for x in X]
    return double(rows)


@pytest.mark.parametrize(
    ("name", "options", "train"),
    [
        ("esolm", {"alpha_0": 0.0}, True),
        ("esolm", {"alpha_0": 0.0}, False),
        ("esolm", {"alpha_0": 0.0, "variant": "A"}, True),
        ("esolm", {"alpha_0": 0.0, "variant": "A"}, False),
        ("esolm", {"alpha_0": 0.0, "loss": "any_order"}, True),
        ("esolm", {"alpha_0": 0.0, "loss": "any_order"}, False),
        ("bd3lm", {"block_size": 1}, False),  # in training a block of one is masked at a random rate
    ],
)
def test_the_left_to_right_end(net: Denoiser, name: str, options: dict[str, Any], train: bool) -> None:
    """alpha_0 = 0 and blocks of one are the left-to-right mask-query likelihood, exactly."""
    (found,) = toy.values(toy.make(name, MASK, **options), net, X, RNG, train).values()
    torch.testing.assert_close(found, left_to_right(net), **CLOSE)


def test_mask_queries_are_not_the_shifted_ar(net: Denoiser) -> None:
    """On the same weights `ar` predicts from the token before."""
    found = toy.values(toy.make("ar", MASK), net, X, RNG, False)["nll"]
    assert (found - left_to_right(net)).abs().max() > 0.1
    for b, x in enumerate(X.tolist()):
        out = paper.logits(net, [MASK, *x[:-1]], range(L), paper.left_to_right(L))
        expected = double([paper.nats(out[i], x[i], MASK) for i in range(L)])
        torch.testing.assert_close(found[b], expected, **CLOSE)


def test_ar_from_a_bos_token(net: Denoiser) -> None:
    found = toy.values(toy.make("ar", MASK, first="bos", bos_id=2), net, X, RNG, False)["nll"]
    x = X[0].tolist()
    out = paper.logits(net, [2, *x[:-1]], range(L), paper.left_to_right(L))
    assert found[0, 0].item() == pytest.approx(paper.nats(out[0], x[0], MASK), abs=1e-10)
    with pytest.raises(ValueError, match="beginning-of-sequence"):
        toy.values(toy.make("ar", MASK, first="bos"), net, X, RNG, False)


@pytest.mark.parametrize("train", [True, False])
def test_mdlm_and_bd3lm_of_one_block(net: Denoiser, train: bool) -> None:
    """The same draws, the same values: from the drawn masks, and from one another."""
    mdlm = toy.values(toy.make("mdlm", MASK, t_min=0.05), net, X, RNG, train)["diffusion"]
    block = toy.make("bd3lm", MASK, block_size=L, mask_rate_min=0.05)
    torch.testing.assert_close(toy.values(block, net, X, RNG, train)["diffusion"], mdlm, **CLOSE)
    t = RNG.at("time").times(torch.arange(B), B)[:, 0].tolist()
    u = RNG.at("mask").uniform(torch.arange(B), L)
    for b, x in enumerate(X.tolist()):
        masked, weight = smallest(u[b], t[b])
        if train:
            rate = 0.05 + 0.95 * t[b]
            masked, weight = [v >= 1 - rate for v in u[b].tolist()], 1 / rate
        out = paper.logits(net, [MASK if m else v for m, v in zip(masked, x)], range(L), paper.bidirectional(L))
        nats = [weight * paper.nats(out[i], x[i], MASK) if m else 0.0 for i, m in enumerate(masked)]
        torch.testing.assert_close(mdlm[b], double(nats), **CLOSE)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bd3lm_by_blocks(net: Denoiser, size: int) -> None:
    """A pass of its own for every block: the clean blocks before it and its own z."""
    found = toy.values(toy.make("bd3lm", MASK, block_size=size), net, X, RNG, False)["diffusion"]
    blocks = L // size
    t = RNG.at("time").times(torch.arange(B), B, blocks).tolist()
    u = RNG.at("mask").uniform(torch.arange(B), L)
    for b, x in enumerate(X.tolist()):
        for k in range(blocks):
            at = range(k * size, (k + 1) * size)
            masked, weight = smallest(u[b, at.start : at.stop], t[b][k])
            seen = paper.blocks(L, size)[L:, L:][: at.stop, : at.stop]
            z = [*x[: at.start], *(MASK if m else x[i] for i, m in zip(at, masked))]
            out = paper.logits(net, z, range(at.stop), seen)
            nats = [weight * paper.nats(out[i], x[i], MASK) if m else 0.0 for i, m in zip(at, masked)]
            torch.testing.assert_close(found[b, at.start : at.stop], double(nats), **CLOSE)
