"""The losses are the bounds they are called: means over draws equal sums over all masks and all orders.

Toy sizes, the naive network, and every integral over time in closed form. A mean of n draws is compared with the
exact value at 5 standard errors; with the normal approximation a right estimator fails with p < 6e-7 per comparison,
and the draws are fixed. Stratified times only make the true error smaller than the one computed.

Shapes: L length.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.net.conditionals import order_nats
from support import paper, toy

V, MASK = 4, 3
X = (2, 0, 1, 1)
L = len(X)
DRAWS = 8192
NET = toy.network(V, L)


def time_integral(masks: int, length: int, low: float, high: float = 1.0) -> float:
    """Integral of s^(m-1) (1-s)^(L-m) over the share of masks s: the NELBO's weight of a set of m masks."""
    s, w = np.polynomial.legendre.leggauss(length + 2)  # exact for polynomials of this degree
    s, w = (high - low) / 2 * (s + 1) + low, (high - low) / 2 * w
    return float((w * s ** (masks - 1) * (1 - s) ** (length - masks)).sum())


@functools.cache
def masked_nats(masked: tuple[bool, ...], kind: str) -> float:
    """Nats of the masks of z_t, summed; averaged over the orders that the pattern depends on."""
    if kind.endswith("shift"):
        return shifted_nats(masked, kind.removesuffix("-shift"))
    z = [MASK if m else t for m, t in zip(masked, X)]
    patterns = {
        "mdlm": lambda: [paper.bidirectional(L)],
        "B": lambda: [paper.diffusion_b(sigma) for sigma in paper.orders(masked, ascending=False)],
        "A": lambda: [paper.diffusion_a(sigma, masked) for sigma in paper.orders(masked, ascending=False)],
        "hidden": lambda: [hidden(sigma, masked) for sigma in paper.orders(masked, ascending=True)],
    }[kind]()
    found = [paper.logits(NET, z, range(L), seen) for seen in patterns]
    return sum(paper.nats(out[i], X[i], MASK) for out in found for i in paper.positions(masked, True)) / len(found)


def shifted_nats(masked: tuple[bool, ...], kind: str) -> float:
    """The same by shifted queries."""
    clean, total = masked.count(False), 0.0
    orders = paper.orders(masked, ascending=kind == "hidden")
    for sigma in orders:
        known, asked = sigma[:clean], sigma[clean:]
        out = paper.shifted_logits(NET, X, known, asked, MASK, MASK, kind != "hidden", clean if kind == "A" else 0)
        total += sum(paper.nats(row, X[i], MASK) for i, row in zip(asked, out))
    return total / len(orders)


def hidden(sigma: list[int], masked: tuple[bool, ...]) -> Tensor:
    """(B) with masks hidden from each other."""
    seen = paper.diffusion_b(sigma)
    for i, j in itertools.permutations(paper.positions(masked, True), 2):
        seen[i, j] = False
    return seen


def mdm(kind: str, alpha_0: float = 1.0) -> float:
    """L_MDM with alpha_t = alpha_0 (1 - t), by enumeration."""
    sets = [m for m in paper.all_masks(L) if any(m)]
    return sum(time_integral(sum(m), L, 1 - alpha_0) * masked_nats(m, kind) for m in sets)


@functools.cache
def one_query(sigma: tuple[int, ...], step: int, num_clean: int, shift: bool = False) -> float:
    if shift:
        out = paper.shifted_logits(NET, X, sigma[:step], sigma[step : step + 1], MASK, MASK, together=num_clean)
        return paper.nats(out[0], X[sigma[step]], MASK)
    return paper.query_nats(NET, X, sigma, step, MASK, num_clean)


def by_order(alpha_0: float, variant: str = "B", sequential_only: bool = False, shift: bool = False) -> float:
    """E_sigma of the nats of every token, or of the masks of z_0 only (the AR loss): sigma from P_L^alpha_0."""
    total = 0.0
    for masked in paper.all_masks(L):
        clean = masked.count(False)
        chance = alpha_0**clean * (1 - alpha_0) ** (L - clean)
        orders = paper.orders(masked, ascending=True)
        first, together = (clean, clean) if sequential_only else (0, 0)
        together = together if variant == "A" else 0
        for sigma in orders:
            nats = sum(one_query(tuple(sigma), s, together, shift) for s in range(first, L))
            total += chance / len(orders) * nats
    return total


def bd3lm(size: int) -> float:
    """The sum over blocks of L_MDM of the block given the clean blocks before it."""
    total = 0.0
    for start in range(0, L, size):
        context, end = list(range(start)), start + size
        seen = paper.none(end)
        for i, j in itertools.product(range(end), repeat=2):
            seen[i, j] = i // size >= j // size
        for masked in paper.all_masks(size):
            z = [*(X[i] for i in context), *(MASK if m else X[start + i] for i, m in enumerate(masked))]
            if any(masked):
                out = paper.logits(NET, z, range(end), seen)
                nats = sum(paper.nats(out[start + i], X[start + i], MASK) for i in paper.positions(masked, True))
                total += time_integral(sum(masked), size, 0) * nats
    return total


def left_to_right() -> float:
    return sum(one_query(tuple(range(L)), s, 0) for s in range(L))


def draw(name: str, train: bool = False, **options: Any) -> dict[str, Tensor]:
    """Nats of the text in many draws, per term."""
    found = toy.make(name, MASK, **options)
    x = torch.tensor(X).expand(DRAWS, -1)
    with torch.no_grad():
        return {k: v.sum(1) for k, v in toy.values(found, NET, x, Randomness(2024, 0, DRAWS), train).items()}


def agrees(nats: Tensor, exact: float, power: float = 0.02) -> None:
    """Within 5 standard errors, which must be small enough for the test to say something."""
    error = nats.std().item() / math.sqrt(len(nats))
    assert error < power * exact
    assert abs(nats.mean().item() - exact) < 5 * error + 1e-10


def test_mdlm() -> None:
    agrees(draw("mdlm")["diffusion"], mdm("mdlm"))


@functools.cache
def query_in_block(known: tuple[int, ...], size: int, x: tuple[int, ...] = X) -> list[float]:
    """The nats of every position, given the blocks before it and the known positions of its own block."""
    out = []
    for start in range(0, L, size):
        end = start + size
        seen = paper.none(end)
        for i, j in itertools.product(range(end), repeat=2):
            seen[i, j] = i // size >= j // size
        z = [x[i] if i < start or i - start in known else MASK for i in range(end)]
        logits = paper.logits(NET, z, range(end), seen)
        out += [paper.nats(logits[i], x[i], MASK) for i in range(start, end)]
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_exact_bd3lm(size: int) -> None:
    """The mean over all orders of every block; at most the bound, and equal to it for blocks of one token."""
    expected = 0.0
    for start in range(0, L, size):
        orders = [*itertools.permutations(range(size))]
        each = [
            math.exp(-sum(query_in_block(tuple(sorted(sigma[:k])), size)[start + sigma[k]] for k in range(size)))
            for sigma in orders
        ]
        expected -= math.log(sum(each) / len(orders))
    found = toy.make("bd3lm", MASK, block_size=size)
    x = torch.tensor([*itertools.product(range(V - 1), repeat=L)])
    with torch.no_grad():
        nats = found.exact_nats(NET, Batch(x))
    assert nats[[*map(tuple, x.tolist())].index(X)].item() == pytest.approx(expected, abs=1e-10)
    assert (-nats).exp().sum().item() == pytest.approx(1, abs=1e-10)
    assert expected <= bd3lm(size) + 1e-10
    assert (expected == pytest.approx(bd3lm(size), abs=1e-10)) == (size == 1)


def test_exact_bd3lm_with_given_tokens_and_padding() -> None:
    """p(target | given) = p(all) / p(given) where the given ones are whole blocks; padding changes nothing."""
    found, x = toy.make("bd3lm", MASK, block_size=2), torch.tensor([X, X])
    given = torch.tensor([[True, True, False, False], [True, False, False, False]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    with torch.no_grad():
        whole, first = (found.exact_nats(NET, Batch(x[:1, :n])) for n in (4, 2))
        kept = found.exact_nats(NET, Batch(x[:1], None, given[:1]))
        padded = found.exact_nats(NET, Batch(x[1:], valid[1:]))
        both = found.exact_nats(NET, Batch(x, valid, given))
    assert kept.item() == pytest.approx((whole - first).item(), abs=1e-10)
    assert padded.item() == pytest.approx(first.item(), abs=1e-10)
    assert both[0].item() == pytest.approx(kept.item(), abs=1e-10)
    assert both[1].item() == pytest.approx(query_in_block((0,), 2)[1], abs=1e-10)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bd3lm(size: int) -> None:
    agrees(draw("bd3lm", block_size=size)["diffusion"], bd3lm(size))


query = pytest.mark.parametrize("query", ["mask", "shift"])


@query
@pytest.mark.parametrize("variant", ["B", "A"])
@pytest.mark.parametrize("alpha_0", [1.0, 0.5, 0.125])
def test_diffusion_term(variant: str, alpha_0: float, query: str) -> None:
    found = draw("esolm", alpha_0=alpha_0, variant=variant, query=query)
    assert set(found) == ({"diffusion"} if alpha_0 == 1 else {"diffusion", "sequential"})
    agrees(found["diffusion"], mdm(variant if query == "mask" else f"{variant}-shift", alpha_0), power=0.05)


@query
@pytest.mark.parametrize("variant", ["B", "A"])
@pytest.mark.parametrize("alpha_0", [0.0, 0.5, 0.875])
def test_sequential_term(variant: str, alpha_0: float, query: str) -> None:
    found = draw("esolm", alpha_0=alpha_0, variant=variant, query=query)
    exact = by_order(alpha_0, variant, sequential_only=True, shift=query == "shift")
    agrees(found["sequential"], exact, power=0.05)


@query
@pytest.mark.parametrize("alpha_0", [0.0, 0.5, 1.0])
def test_any_order_loss(alpha_0: float, query: str) -> None:
    exact = by_order(alpha_0, shift=query == "shift")
    agrees(draw("esolm", alpha_0=alpha_0, loss="any_order", query=query)["any_order"], exact)


def test_the_bounds_are_not_all_the_same() -> None:
    """Or the tests above would not tell one system from another: they differ by far more than their errors."""
    exact = [mdm("mdlm"), mdm("B"), mdm("A"), bd3lm(2), left_to_right(), by_order(1.0), by_order(0.5)]
    exact += [mdm(v, 0.5) + by_order(0.5, v, sequential_only=True) for v in ("B", "A")]
    for one, two in itertools.combinations(exact, 2):
        assert abs(one - two) > 1e-3 * one


def test_the_ends_by_enumeration() -> None:
    """One block is MDLM, blocks of one and alpha_0 = 0 are left to right."""
    assert bd3lm(L) == pytest.approx(mdm("mdlm"), abs=1e-10)
    assert bd3lm(1) == pytest.approx(left_to_right(), abs=1e-10)
    for variant in ("B", "A"):
        assert by_order(0.0, variant, sequential_only=True) == pytest.approx(left_to_right(), abs=1e-10)
        assert mdm(variant, 0.0) == 0
        assert by_order(1.0, variant, sequential_only=True) == 0


@query
@pytest.mark.parametrize("alpha_0", [1.0, 0.5, 0.125, 0.0])
def test_any_order_equals_diffusion_if_masks_are_hidden_from_each_other(alpha_0: float, query: str) -> None:
    """L_AO = L_MDM, and with the AR loss for alpha_0 < 1; for (B), whose masks see earlier masks, they differ."""
    shift, end = query == "shift", "-shift" if query == "shift" else ""
    sequential, every = by_order(alpha_0, sequential_only=True, shift=shift), by_order(alpha_0, shift=shift)
    assert mdm(f"hidden{end}", alpha_0) + sequential == pytest.approx(every, abs=1e-10)
    if alpha_0 > 0:
        assert abs(mdm(f"B{end}", alpha_0) + sequential - every) > 1e-3


def test_one_pass_per_order_gives_the_any_order_bound() -> None:
    sigma = torch.tensor(list(itertools.permutations(range(L))))
    x = torch.tensor(X).expand(len(sigma), -1)
    nats = order_nats(NET, x, sigma, torch.ones_like(x, dtype=torch.bool), MASK).sum(1)
    assert nats.mean().item() == pytest.approx(by_order(1.0), abs=1e-10)
    assert -torch.logsumexp(-nats, 0).item() + math.log(len(nats)) < nats.mean().item()  # Jensen, and not vacuously


@pytest.mark.parametrize("t_min", [0.2, 1e-3])
def test_mdlm_in_training(t_min: float) -> None:
    """Its mean is the bound over times above t_min; that is off by at most t_min times a token's nats, per token."""
    sets = [m for m in paper.all_masks(L) if any(m)]
    cut = sum(time_integral(sum(m), L, t_min) * masked_nats(m, "mdlm") for m in sets) / (1 - t_min)
    worst = max(masked_nats(m, "mdlm") for m in sets)
    assert 0 < abs(cut - mdm("mdlm")) < t_min * worst * L
    agrees(draw("mdlm", train=True, t_min=t_min)["diffusion"], cut, power=0.1)


def test_bd3lm_in_training() -> None:
    """The clipped schedule is the bound over shares of masks between its two ends."""
    low, high = 0.3, 0.8
    sets = [m for m in paper.all_masks(L) if any(m)]
    cut = sum(time_integral(sum(m), L, low, high) * masked_nats(m, "mdlm") for m in sets) / (high - low)
    found = draw("bd3lm", train=True, block_size=L, mask_rate_min=low, mask_rate_max=high)
    agrees(found["diffusion"], cut)
    assert abs(cut - mdm("mdlm")) > 0.01 * cut


def test_bd3lm_with_masks_drawn_again() -> None:
    """With `resample`, the masks of a set at time t have their probability given that 2 or 3 of 4 are masked."""
    low, high = 0.3, 0.8
    t, w = np.polynomial.legendre.leggauss(60)
    t, w = (high - low) / 2 * (t + 1) + low, w / 2
    sets = [m for m in paper.all_masks(L) if low <= sum(m) / L <= high]
    chances = [t ** sum(m) * (1 - t) ** (L - sum(m)) for m in sets]
    expected = sum(float((w / t * p / sum(chances)).sum()) * masked_nats(m, "mdlm") for m, p in zip(sets, chances))
    options = {"block_size": L, "mask_rate_min": low, "mask_rate_max": high}
    agrees(draw("bd3lm", train=True, resample=True, **options)["diffusion"], expected)
    assert abs(draw("bd3lm", train=True, **options)["diffusion"].mean() - expected) > 0.02 * expected


@pytest.mark.parametrize("variant", ["B", "A"])
def test_esolm_in_training(variant: str) -> None:
    """Each term on its share of the batch has the bound's own mean; kappa changes the share only."""
    for kappa in (0.5, 0.25):
        found = draw("esolm", train=True, alpha_0=0.5, variant=variant, kappa=kappa)
        assert len(found["diffusion"]) == kappa * DRAWS
        assert len(found["sequential"]) == (1 - kappa) * DRAWS
        agrees(found["diffusion"], mdm(variant, 0.5), power=0.05)
        agrees(found["sequential"], by_order(0.5, variant, sequential_only=True), power=0.05)


@pytest.mark.parametrize(
    ("system", "pattern", "options"),
    [("esolm", "B", {"alpha_0": 1.0}), ("mdlm", "mdlm", {})],
    ids=["esolm", "mdlm"],
)
def test_weights_in_training(system: str, pattern: str, options: dict[str, float]) -> None:
    """Unit weights: the mean number of nats of the masks, with t uniform. With elbo weights, the bound above t_min."""
    sets = [m for m in paper.all_masks(L) if any(m)]
    unit = sum(beta(sum(m) + 1, L - sum(m) + 1) * masked_nats(m, pattern) for m in sets)
    agrees(draw(system, train=True, weights="unit", **options)["diffusion"], unit)
    assert abs(unit - mdm(pattern)) > 0.1
    cut = sum(time_integral(sum(m), L, 0.2) * masked_nats(m, pattern) for m in sets) / 0.8
    agrees(draw(system, train=True, weights="elbo", t_min=0.2, **options)["diffusion"], cut)
    agrees(draw(system, train=False, weights="unit", **options)["diffusion"], mdm(pattern))


def beta(a: int, b: int) -> float:
    return math.gamma(a) * math.gamma(b) / math.gamma(a + b)


def test_time_integral() -> None:
    for m in range(1, 6):
        assert time_integral(m, 5, 0) == pytest.approx(beta(m, 6 - m), rel=1e-12)


def test_ar_is_a_distribution() -> None:
    """All L tokens scored: the probabilities of all sequences sum to one."""
    x = torch.tensor(list(itertools.product(range(V - 1), repeat=L)))
    for adaln in (True, False):
        net = toy.network(V, L, adaln=adaln)
        for options in ({}, {"first": "bos", "bos_id": 1}):
            nats = toy.values(toy.make("ar", MASK, **options), net, x, Randomness(0), False)["nll"]
            assert (nats > 0).all()
            assert (-nats.sum(1)).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_the_mean_over_a_fixed_batch_is_the_mean_bound() -> None:
    """Different texts in a fixed order, over many keys: no text is tied to a noise level."""
    x = torch.tensor([X, X[::-1]]).repeat_interleave(2, 0)  # sorted by text, as a corpus is
    found = toy.make("mdlm", MASK)
    with torch.no_grad():
        runs = [toy.values(found, NET, x, Randomness(k, 0, 4), False)["diffusion"].sum(1)[:2] for k in range(1500)]
    agrees(torch.stack(runs).mean(1), mdm("mdlm"))
