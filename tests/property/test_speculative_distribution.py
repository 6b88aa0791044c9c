"""Speculative samples follow the distribution of the one-token sampler, enumerated from the naive one.

Pearson's chi-square with fixed seeds: a right sampler would be called wrong with chance 1e-6 per test, 24 of them. Four
wrong samplers are called wrong, each with more certainty than 1 - 1e-12.

Shapes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core import draw
from esolm.core.batch import Batch
from esolm.core.draw import Draw
from esolm.core.order import Schedule
from esolm.core.randomness import Randomness
from esolm.sampling import chooser, speculative
from esolm.sampling.request import Request
from support import engines, toy
from support.chance import ALARM, chance, given_the_plans, rows
from support.naive import Naive, Plan, Tokens, plan_of, run

N, L, V = 20000, 5, 4
MASK = V - 1
RNG = Randomness(23, 0, N)
SURE = 1e-12
SIGMA = (3, 0, 4, 2, 1)
NETS = {"random": toy.network(V, L, seed=11, width=8, heads=1, mlp_ratio=1)}
SYSTEMS: dict[str, Any] = {
    "two_term": toy.make("esolm", MASK),
    "any_order": toy.make("esolm", MASK, loss="any_order"),
    "shift": toy.make("esolm", MASK, query="shift", first="bos", bos_id=1),
}
DRAWS = {
    "temperature": Draw(temperature=0.6),
    "top_p": Draw(top_p=0.8),
    "top_k": Draw(top_k=2),
    "all": Draw(temperature=1.4, top_p=0.9, top_k=2),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cumulative weights of a vocabulary of four in two blocks, and not padded to 256."""
    monkeypatch.setattr(draw, "BLOCK", 2)


class Shaped(Naive):
    """The naive sampler with temperature, top-k and top-p, which shape each conditional."""

    def __init__(self, net: Any, how: Draw) -> None:
        super().__init__(net, "B", MASK)
        self.how = how

    def conditional(self, plan: Plan, k: int, known: Any) -> Tensor:
        clean = plan.given + sum(plan.steps[:k], ())
        key = (clean, tuple(known[i] for i in clean), plan.steps[k])
        if key not in self.memo:
            self.memo[key] = self.how.probabilities(self.logits(plan, k, known), MASK)
        return self.memo[key]


NAIVE = Naive(NETS["random"], "B", MASK)


def one_by_one(sigma: Tokens, given: Tokens = ()) -> Plan:
    return Plan(given, tuple((i,) for i in sigma if i not in given), len(sigma) - len(given))


def ask(*known: dict[int, int], length: int = L, lengths: Tokens = (), **options: Any) -> Request:
    """N rows in turns of `known`, given tokens by position, with the order SIGMA unless another is asked for."""
    known = known or ({},)
    x, fixed = torch.zeros(N, length, dtype=torch.long), torch.zeros(N, length, dtype=torch.bool)
    valid = torch.ones_like(fixed)
    for k, tokens in enumerate(known):
        for i, token in tokens.items():
            x[k :: len(known), i], fixed[k :: len(known), i] = token, True
        if lengths:
            valid[k :: len(known), lengths[k] :] = False
    if "alpha_0" not in options:
        options["order"] = torch.tensor([SIGMA])
    return toy.request(x, fixed, valid, sampler="speculative", **options)


def draws(request: Request, net: str = "random", loss: str = "two_term") -> tuple[Tensor, Schedule]:
    tokens, schedule, _ = run(SYSTEMS[loss], NETS[net], request, RNG)
    return tokens, schedule


@pytest.mark.matrix(2)
@pytest.mark.parametrize("window", [1, 2, 4, L, None])
def test_every_window(window: int | None) -> None:
    tokens, _ = draws(ask(window=window))
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) > ALARM
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA[::-1]), {})) < SURE  # another order is another law


@pytest.mark.parametrize("window", [2, L, None])
def test_shifted_queries(window: int | None) -> None:
    naive = Naive(NETS["random"], "B-shift", MASK, 1)
    tokens, _ = draws(ask(window=window), loss="shift")
    assert chance(rows(tokens), naive.joint(one_by_one(SIGMA), {})) > ALARM
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) < SURE
    known = {2: 0, 3: 2}
    tokens, _ = draws(ask(known, window=window, given_order="ascending"), loss="shift")
    plan = one_by_one(SIGMA, tuple(known))
    assert chance(rows(tokens), naive.joint(plan, known)) > ALARM


def test_the_any_order_loss_samples_alike() -> None:
    tokens, _ = draws(ask(window=3), loss="any_order")
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) > ALARM


@pytest.mark.parametrize("window", [3, None])
def test_the_native_engine(window: int | None) -> None:
    NETS["native"] = engines.native(copy.deepcopy(NETS["random"]).float())
    tokens, _ = draws(ask(window=window), "native")
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) > ALARM


@pytest.mark.parametrize("window", [2, None])
@pytest.mark.parametrize("alpha_0", [0.0, 0.5, 1.0])
def test_orders_of_every_share(alpha_0: float, window: int | None) -> None:
    """Given the orders that were drawn, which are those of first_hitting."""
    tokens, schedule = draws(ask(length=3, alpha_0=alpha_0, window=window))
    assert given_the_plans(tokens, schedule, NAIVE, {}) > ALARM
    x, none = (torch.zeros(N, 3, dtype=t) for t in (torch.long, torch.bool))
    first_hitting = toy.request(x, none, ~none, sampler="first_hitting", alpha_0=alpha_0)
    assert torch.equal(SYSTEMS["two_term"].plan(first_hitting, RNG).sigma, schedule.sigma)


@pytest.mark.parametrize("name", DRAWS)
def test_temperature_and_cuts(name: str) -> None:
    tokens, _ = draws(ask(draw=DRAWS[name], window=3))
    law = Shaped(NETS["random"], DRAWS[name]).joint(one_by_one(SIGMA), {})
    assert chance(rows(tokens), {x: p for x, p in law.items() if p > 0}) > ALARM
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) < SURE


@pytest.mark.parametrize("window", [2, L])
def test_ragged_batches_of_prompts_and_infills(window: int) -> None:
    """Four requests in turns: nothing given, a prompt, two tokens in the middle, and a shorter text."""
    known: list[dict[int, int]] = [{}, {0: 1, 1: 2}, {2: 0, 3: 2}, {1: 1}]
    lengths = (5, 5, 5, 3)
    tokens, schedule = draws(ask(*known, lengths=lengths, window=window, given_order="ascending"))
    for k, (fixed, length) in enumerate(zip(known, lengths)):
        plan = one_by_one(tuple(i for i in SIGMA if i < length), tuple(fixed))
        assert plan_of(schedule, k) == plan
        assert chance(rows(tokens[k::4, :length]), NAIVE.joint(plan, fixed)) > ALARM


def trained() -> Any:
    """A network that has learned, in a second, what pairs of tokens follow each other."""
    torch.manual_seed(0)
    net = toy.network(V, L, seed=3).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    step = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]], dtype=torch.float64)
    for k in range(150):
        x = torch.zeros(64, L, dtype=torch.long)
        for i in range(L):
            x[:, i] = torch.multinomial(step[x[:, i - 1] if i else x[:, 0]], 1)[:, 0]
        (term,) = SYSTEMS["any_order"].terms(net, Batch(x), Randomness(k, 0, 64), True)
        optimizer.zero_grad()
        term.nats.mean().backward()
        optimizer.step()
    assert term.nats.mean() < 0.9  # log 3 = 1.10 knows nothing
    return net.eval()


@pytest.mark.slow
def test_a_trained_network() -> None:
    NETS["trained"] = net = trained()
    tokens, _ = draws(ask(window=4), "trained")
    assert chance(rows(tokens), Naive(net, "B", MASK).joint(one_by_one(SIGMA), {})) > ALARM


def accept_always(p: Tensor, q: Tensor, token: Tensor, u: Tensor) -> Tensor:
    return torch.ones_like(token, dtype=torch.bool)


def keep_drafts() -> Any:
    """The first draft of a position is kept, and judged by a q that came after it."""
    kept = torch.full((N, L), -1)

    def draft(choose: Any, logits: Tensor, row: Tensor, position: Tensor) -> Tensor:
        new = choose(logits, row, position)
        kept[row, position] = torch.where(kept[row, position] < 0, new, kept[row, position])
        return kept[row, position]

    return draft


WRONG = {
    "accept always": {"accept": accept_always},
    "p and q swapped": {
        "accept": lambda p, q, token, u, right=speculative.accept: right(q, p, token, u),
        "residual": lambda p, q, right=speculative.residual: right(q, p),
    },
    "replaced from p": {"residual": lambda p, q: p},
    "a kept draft": {"draft": keep_drafts()},
}


@pytest.mark.parametrize("name", WRONG)
def test_power_a_wrong_sampler_is_called_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, wrong in WRONG[name].items():
        monkeypatch.setattr(speculative, function, wrong)
    tokens, _ = draws(ask(window=4))
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) < SURE


def test_power_masks_that_see_a_draft_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that knows the token that it checks, or another stale context, is another distribution."""
    right = speculative.labels

    def wrong(clean: Tensor, masks: Tensor, end: Tensor, fill: int) -> Any:
        return right(clean, torch.where(masks < fill, masks + 1, masks), end, fill + 1)

    monkeypatch.setattr(speculative, "labels", wrong)
    tokens, _ = draws(ask(window=4))
    assert chance(rows(tokens), NAIVE.joint(one_by_one(SIGMA), {})) < SURE


def test_the_numbers_of_a_position_are_independent() -> None:
    """Drafts, judgements and replacements have numbers of their own: 1000 rows, correlations within 5 sigma."""
    choose = chooser.Chooser(Draw(), RNG, MASK)
    row, at = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    device = torch.device("cpu")
    u = [choose.uniform(name, row, at, device) for name in ("accept", "residual")]
    u.append(draw.inverse_cdf(torch.ones(1000, 1000), chooser.uniform(chooser.fold(RNG.key, 0), row, at)).double())
    for a, b in itertools.combinations(u, 2):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / 1000**0.5
