"""A Markov source whose likelihood is known: the model's exact value lies between it and the any-order bound.

Six tokens of four states, so that p(x) is enumerated over all 720 orders (and, at alpha_0 = 0.5, over P_L^alpha_0).

Shapes: n sequences, L length, S states.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import total
from esolm.likelihood import estimators
from esolm.likelihood import scoring as evaluate
from esolm.likelihood.orders import is_exact
from esolm.likelihood.texts import Sequences
from esolm.model import LanguageModel
from esolm.net.denoiser import Denoiser, DenoiserConfig
from esolm.systems import find
from support import paper

S, L, MASK = 4, 6, 4
BATCH, STEPS, RATE = 64, 250, 4e-3
N, K = 96, 32
ORDERS = torch.tensor(list(itertools.permutations(range(L))))


def source(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences [n, L] and their own nats [n]: the first state is uniform, then rows of a table."""
    step = (1.8 * torch.randn(S, S, generator=torch.Generator().manual_seed(11))).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randint(S, (count,), generator=generator)]
    for _ in range(L - 1):
        x.append(torch.multinomial(step[x[-1]], 1, generator=generator)[:, 0])
    tokens = torch.stack(x, 1)
    return tokens, math.log(S) - step.double()[tokens[:, :-1], tokens[:, 1:]].log().sum(1)


@pytest.fixture(scope="module", params=[1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    """Trained for a few seconds."""
    torch.manual_seed(0)
    system = find("esolm")(mask_id=MASK, alpha_0=request.param, loss="any_order")
    net = Denoiser(DenoiserConfig(S + 1, L, layers=2, width=32, heads=2, cond_width=16, dropout=0.0, mlp_ratio=2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    everything = torch.ones(BATCH, L, dtype=torch.bool)
    for step, x in enumerate(source(BATCH * STEPS, 1)[0].split(BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 1.0, 2 * (1 - step / STEPS))
        rng = Randomness(0, 0, BATCH).at(step)
        total(system.terms(net, Batch(x), rng, True), system.counts(everything, rng)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return LanguageModel(net.eval(), system, None)  # type: ignore[arg-type]


def chances(alpha_0: float) -> Tensor:
    """P_L^alpha_0 of every order."""
    place = {tuple(sigma): i for i, sigma in enumerate(ORDERS.tolist())}
    chance = torch.zeros(len(ORDERS), dtype=torch.float64)
    for masked in paper.all_masks(L):
        clean, found = masked.count(False), paper.orders(masked, ascending=True)
        for sigma in found:
            chance[place[tuple(sigma)]] += alpha_0**clean * (1 - alpha_0) ** (L - clean) / len(found)
    return chance


@torch.no_grad()
def every_order(lm: LanguageModel, x: Tensor) -> Tensor:
    """log p(x | sigma) of every order, [n, 720]."""
    columns = []
    for sigma in ORDERS.split(90):
        rows = x.repeat_interleave(len(sigma), 0)
        nats = lm.system.order_nats(lm.net, Batch(rows), sigma.repeat(len(x), 1))  # type: ignore
        columns.append(-nats.double().sum(1).view(len(x), -1))
    return torch.cat(columns, 1)


@pytest.mark.slow
def test_source_exact_bound(lm: LanguageModel) -> None:
    """Source <= exact (paired, 3 standard errors: a right one fails with p < 0.0014, and the draws are fixed) and
    exact < L_AO, by enumeration; the estimators on drawn orders agree with both. No inequality with the NELBO of the
    two-term loss is asserted: its process differs a little; it is printed."""
    x, own = source(N, 2)
    texts = Sequences("chain", Batch(x), 0)
    log_w, chance = every_order(lm, x), chances(lm.system.alpha_0)  # type: ignore[attr-defined]
    exact, single = -(log_w + chance.log()).logsumexp(1), -(log_w * chance).sum(1)
    assert not is_exact(lm.system)

    above = exact - own
    error = above.std().item() / math.sqrt(N)
    assert above.mean().item() > -3 * error
    assert above.mean().item() / L < 0.06  # it has learned the source: uniform would be 0.4 above
    assert (single > exact).all()
    assert (single - exact).mean() > 0.01

    found = {name: evaluate.score(lm, texts, name, num_orders=K).nats for name in evaluate.ESTIMATORS[1:]}
    agree(found["any-order"], single)
    assert (found["iw"] - exact).mean().item() > -5 * (found["iw"] - exact).std().item() / math.sqrt(N)
    assert exact.mean() < found["iw"].mean() < single.mean()
    assert (found["jackknife"] - exact).mean().abs() < (found["iw"] - exact).mean()

    two_term = LanguageModel(lm.net, find("esolm")(mask_id=MASK, alpha_0=lm.system.alpha_0), None)  # type: ignore
    nelbo = evaluate.nelbo(two_term, texts, num_draws=8).nats
    names = {"source": own, "exact": exact, "jackknife": found["jackknife"], "iw": found["iw"], "L_AO": single}
    print({name: round(v.mean().item() / L, 4) for name, v in {**names, "NELBO": nelbo}.items()})


def agree(found: Tensor, expected: Tensor) -> None:
    """At 5 standard errors of the paired difference."""
    difference = found - expected
    assert abs(difference.mean().item()) < 5 * difference.std().item() / math.sqrt(len(difference))


def test_antithetic_orders_help_a_trained_model(lm: LanguageModel) -> None:
    """Negatively correlated over all orders, and a pair bounds better than two independent ones, by enumeration."""
    if lm.system.alpha_0 < 1:  # type: ignore[attr-defined]
        lm = LanguageModel(lm.net, find("esolm")(mask_id=MASK, alpha_0=1.0), None)  # type: ignore[arg-type]
    log_w = every_order(lm, source(24, 3)[0])
    place = {tuple(sigma): i for i, sigma in enumerate(ORDERS.tolist())}
    other = log_w[:, [place[tuple(reversed(sigma))] for sigma in ORDERS.tolist()]]
    pairs = estimators.bound(torch.stack([log_w, other], -1)).mean()
    a, b = (t - t.mean(1, keepdim=True) for t in (log_w, other))
    correlation = (a * b).sum() / (a * a).sum()
    assert correlation < 0
    independent = (math.log(2) - torch.logaddexp(log_w[:, :, None], log_w[:, None])).mean()
    assert pairs < independent
