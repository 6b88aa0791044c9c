"""One pass equals L passes, in value and in gradient; L_AO is L_MDM where masks are hidden; batches do not matter.

Shapes: B batch, L length.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core import order
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import token_nats
from esolm.core.visibility import HIDDEN, Visibility, causal, full, hide, two_stream
from esolm.likelihood.orders import under_orders, weigh
from esolm.net.denoiser import Denoiser, Rows
from support import toy

B, L, V = 5, 7, 6
MASK = V - 1
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("mdlm", {}),
    ("esolm", {"alpha_0": 1.0}),
    ("esolm", {"alpha_0": 0.5}),
    ("esolm", {"alpha_0": 0.0}),
    ("esolm", {"alpha_0": 0.75, "query": "shift", "first": "bos", "bos_id": 1}),
]


@pytest.fixture(params=SYSTEMS, ids=lambda s: f"{s[0]}{s[1].get('alpha_0', '')}")
def system(request: pytest.FixtureRequest) -> Any:
    return toy.make(request.param[0], MASK, **request.param[1])


@pytest.fixture(scope="module", params=[True, False], ids=["AdaLN", "plain"])
def net(request: pytest.FixtureRequest) -> Denoiser:
    return toy.network(V, L, adaln=request.param)


def by_passes(net: Denoiser, x: Tensor, sigma: Tensor, scored: Tensor, query: str) -> Tensor:
    """L passes over the clean tokens so far, sorted, and one query; differentiable."""
    columns = []
    for step in range(L):
        place = sigma[:, : step + 1]
        tokens = x.gather(1, place).clone()
        tokens[:, -1] = MASK
        if query == "shift":
            logits = torch.stack([shifted(net, x[b], sigma[b], step) for b in range(len(x))])
        else:
            logits = net(tokens, place, causal(step + 1), out=Rows(slice(step, step + 1)))[:, 0]
        columns.append(token_nats(logits.clone(), x.gather(1, place)[:, -1], MASK))
    nats = torch.stack(columns, 1).gather(1, order.inverse(sigma))
    return torch.where(scored, nats, 0.0)


def shifted(net: Denoiser, x: Tensor, sigma: Tensor, step: int) -> Tensor:
    """Logits of one position by a shifted query, [V]: where its token is known, by the clean tokens and that token in
    place of a query, and otherwise by the clean tokens and a mask."""
    place, at = sigma[:step].tolist(), int(sigma[step])
    tokens, known = torch.tensor([MASK, *x[place].tolist()]), at == 0 or at - 1 in place
    query = torch.tensor([MASK if at == 0 or not known else int(x[at - 1])])
    seen = torch.cat([causal(step + 1).rank, torch.tensor([[step + 1]])], 1)
    rank = torch.where(torch.arange(step + 2) < step + 1, seen, HIDDEN if known else step + 1)
    visibility = Visibility(rank, seen, torch.full_like(rank, -1))
    position = torch.tensor([0, *(i + 1 for i in place), at])
    return net(torch.cat([tokens, query])[None], position[None], visibility)[0, -1]


def gradients(net: Denoiser, loss: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("query", ["mask", "shift"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("context", [0, 3])
def test_one_pass_equals_l_passes_with_its_gradient(net: Denoiser, seed: int, context: int, query: str) -> None:
    """A random weight for every token, as in policy gradients."""
    x, sigma = toy.text(B, L, V, seed), toy.permutations(B, L, seed)
    scored = order.inverse(sigma) >= context
    weight = torch.rand(B, L, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    system = toy.make("esolm", MASK, alpha_0=1.0, query=query)
    one, many = system.order_nats(net, Batch(x, given=~scored), sigma), by_passes(net, x, sigma, scored, query)
    torch.testing.assert_close(one, many, **CLOSE)
    assert torch.equal(one > 0, scored)
    for a, b in zip(gradients(net, (one * weight).sum()), gradients(net, (many * weight).sum())):
        torch.testing.assert_close(a, b, **CLOSE)
        assert a.abs().max() > 1e-6


def test_the_gradient_of_the_bidirectional_likelihood() -> None:
    """Finite differences of one parameter, through L passes."""
    net, system = toy.network(V, L), toy.make("mdlm", MASK)
    x, sigma = toy.text(B, L, V), toy.permutations(B, L)
    weight = net.blocks[0].attn_qkv.weight
    (gradient,) = torch.autograd.grad(system.order_nats(net, Batch(x), sigma).sum(), weight)
    for i, j in ((0, 0), (17, 3), (40, 9)):
        values = []
        with torch.no_grad():
            for change in (1e-5, -2e-5):
                weight[i, j] += change
                values.append(system.order_nats(net, Batch(x), sigma).sum().item())
            weight[i, j] += 1e-5
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(gradient[i, j].item(), rel=1e-5, abs=1e-7)


def test_any_order_is_the_diffusion_bound_if_masks_are_hidden(net: Denoiser) -> None:
    """L_AO = L_MDM, both enumerated with the library's own passes. L_MDM: m uniform in 1 .. n, each set of m masks
    alike, weight n/m, clean tokens in every order, masks that see them and themselves. For (B), whose masks see each
    other, test_bounds.py shows that they differ."""
    n = 4
    x = toy.text(1, n, V)
    diffusion = torch.zeros(1, dtype=torch.float64)
    for clean in range(n):
        found = []
        for sigma in itertools.permutations(range(n)):  # each set of masks comes equally often
            place = torch.tensor([[*sigma[clean:], *sigma[:clean]]])
            tokens = x.gather(1, place).clone()
            tokens[:, : n - clean] = MASK
            steps = torch.arange(clean)[None]
            seen = two_stream(steps, torch.full((1, n - clean), clean), steps) if clean else alone(n)
            logits = net(tokens, place, seen, out=Rows(slice(0, n - clean)))[0]
            found.append(token_nats(logits.clone(), x.gather(1, place)[0, : n - clean], MASK).sum())
        diffusion += torch.stack(found).mean() * n / (n - clean) / n
    orders = torch.tensor(list(itertools.permutations(range(n))))
    texts = x.expand(len(orders), -1)
    system = toy.make("esolm", MASK, alpha_0=1.0)
    nats = system.order_nats(net, Batch(texts), orders).sum(1)
    torch.testing.assert_close(nats.mean(0, keepdim=True), diffusion, **CLOSE)
    assert nats.std() > 0.01


def alone(slots: int) -> Visibility:
    """Every slot sees itself only."""
    return hide(full(slots), torch.zeros(1, slots, dtype=torch.bool))


def test_log_weights_do_not_depend_on_the_batch(system: Any) -> None:
    """Together, one by one, in passes of any size, all numbers at once or some at a time; with padding and context."""
    net, x = toy.network(V, L), toy.text(B, L, V)

    def log_weights(batch: Batch, rng: Randomness, numbers: range) -> Tensor:
        return -under_orders(net, system, batch, rng, numbers).double().sum(-1).T

    valid = toy.padding(B, L)
    given = (torch.arange(L) < 2).expand(B, -1) & valid
    for kept in ({}, {"valid": valid}, {"valid": valid, "given": given}):
        together = log_weights(Batch(x, **kept), Randomness(3, 10, 99), range(4))
        assert together.shape == (B, 4)
        again = log_weights(Batch(x, **kept), Randomness(3, 10, 99), range(2, 4))
        torch.testing.assert_close(again, together[:, 2:], **CLOSE)
        for b in range(B):
            one = {name: mask[b : b + 1] for name, mask in kept.items()}
            alone = log_weights(Batch(x[b : b + 1], **one), Randomness(3, 10 + b, 99), range(4))
            torch.testing.assert_close(alone, together[b : b + 1], **CLOSE)
        short = valid.sum(1) > 2  # rows that have something to score
        assert (together[short] < 0).all()


def test_orders_of_different_sequences_are_independent() -> None:
    """Not one order for the batch: the same text many times has as many different orders (chance of fewer than 60
    different of 64 among 5040: below 1e-4; the draws are fixed)."""
    net, x = toy.network(V, L), toy.text(1, L, V).repeat(64, 1)
    system = toy.make("esolm", MASK, alpha_0=1.0)
    assert len(weigh(net, system, Batch(x), 1).unique()) >= 60
    assert len(weigh(net, system, Batch(x[:1]), 64).unique()) >= 60


def test_tokens_and_weights_of_a_conditional_agree(system: Any) -> None:
    net, x = toy.network(V, L), toy.text(B, L, V)
    given = (torch.arange(L) < 3).expand(B, -1)
    tokens = torch.zeros(B, L, dtype=torch.float64)
    log_w = weigh(net, system, Batch(x, given=given), 5, batch_size=7, tokens=tokens)
    torch.testing.assert_close(tokens.sum(1) / 5, log_w.mean(1), **CLOSE)
    assert torch.equal(tokens < 0, ~given)
