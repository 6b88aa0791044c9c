"""D3PM, SEDD and DiffusionBERT on spaces so small that every noisy text can be enumerated.

The constant network: if the prediction is pi whatever is seen, the reverse chain is the forward chain from pi, so the
whole bound of a token x is -log pi(x) for every process, schedule and T. The joint of two tokens: with exact
predictions the bounds are those of `toy.safetensors`, which were enumerated without this code. Samplers are compared
with products of transition matrices by a chi-square test, whose false alarms have probability 1e-6 each; the draws are
fixed.

Shapes: R rows, L length, N tokens without the mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esolm.core import spindle, steps
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import token_nats
from esolm.net.head import Score
from support import chance, toy
from support.golden import Golden

TOY = Golden("toy")
PI = torch.tensor([0.1, 0.25, 0.6, 0.05], dtype=torch.float64)


@dataclass
class Told:
    """Randomness whose times [R, 1] and uniforms [R, L] are given; those of a purpose may be others."""

    t: Tensor
    u: Tensor
    others: dict[str, Tensor]

    @property
    def total(self) -> int:
        return len(self.t)

    def examples(self, batch: int) -> Tensor:
        return torch.arange(batch)

    def at(self, *purpose: int | str) -> Told:
        return Told(self.t, self.others.get(str(purpose[0]), self.u), self.others)

    def times(self, examples: Tensor, total: int) -> Tensor:
        return self.t

    def uniform(self, examples: Tensor, columns: int) -> Tensor:
        return self.u


class Stub:
    """A network that is any function of tokens [R, L] and times [R] -> logits [R, L, N]; the mask gets a logit of 3."""

    def __init__(self, function: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        self.function = function

    def __call__(self, tokens, position, visibility, time=None, cache=None, out=None, score=None) -> Tensor:
        logits = torch.nn.functional.pad(self.function(tokens, time), (0, 1), value=3.0)
        logits = logits.flatten(0, 1)[out.index]
        if score is None:
            return logits
        if isinstance(score, Score):
            nats = token_nats(logits, score.target, score.exclude)
            return nats if score.weight is None else nats * score.weight
        return score.function(logits, *score.inputs)


def outcomes(noise: str, kept: float, states: int) -> list[tuple[float, float]]:
    """A uniform number and a probability for each thing that can happen to a token."""
    if noise == "absorb":
        return [(kept / 2, kept), ((1 + kept) / 2, 1 - kept)]
    redrawn = [(kept + (1 - kept) * (k + 0.5) / states, (1 - kept) / states) for k in range(states)]
    return [(kept / 2, kept), *redrawn]


def every(
    noise: str, kept_at: dict[float, float], length: int, states: int, weight: Callable[[float], float]
) -> Iterator[tuple[list[int], float, list[float], float]]:
    """(text, time, uniforms, probability without that of the text) of all texts, times and noises."""
    for t, kept in kept_at.items():
        for events in itertools.product(outcomes(noise, kept, states), repeat=length):
            mass = weight(t) * math.prod(p for _, p in events)
            for text in itertools.product(range(states), repeat=length):
                yield list(text), t, [u for u, _ in events], mass


def columns(rows: list) -> tuple[Tensor, ...]:
    """What `every` yields as tensors: x int [R, L], t [R], u [R, L], mass [R]."""
    x, *rest = zip(*rows)
    return torch.tensor(x), *(torch.tensor(column, dtype=torch.float64) for column in rest)


def expected(found: Any, net: Stub, rows: list, p_x: Callable[[Tensor], Tensor], **others: Any) -> Tensor:
    """The expectation of the whole bound, of each text in the end: mass of the texts times nats."""
    x, t, u, mass = (
        torch.tensor(column, dtype=None if i == 0 else torch.float64) for i, column in enumerate(zip(*rows))
    )
    terms = found.terms(net, Batch(x), Told(t[:, None], u, others), False)
    assert [term.name for term in terms] == ["diffusion"]
    return (terms[0].nats.sum(1) * mass * p_x(x)).sum()


def joint(x: Tensor) -> Tensor:
    """p(x) of two tokens."""
    return TOY["joint"][x[:, 0], x[:, 1]]


def seen_joint(noise: str, z: Tensor, alpha: Tensor) -> Tensor:
    """q(z^l | x^l) for every x^l, [R, L, N]: absorbing noise says all or nothing."""
    same = torch.nn.functional.one_hot(z.clamp_max(2), 3).double() * (z < 3)[..., None]
    if noise == "absorb":
        return torch.where((z == 3)[..., None], 1.0, same)
    return alpha[:, None, None] * same + (1 - alpha)[:, None, None] / 3


def leave_one_out(noise: str, alpha_of: Callable[[Tensor], Tensor]) -> Stub:
    """log p(x^l | z without z^l) of the joint of two tokens."""

    def function(z: Tensor, time: Tensor | None) -> Tensor:
        alpha = alpha_of(time) if time is not None else torch.zeros(len(z), dtype=torch.float64)
        likelihood = seen_joint(noise, z, alpha)
        first = likelihood[:, 1] @ TOY["joint"].T  # over x^1, given z^2
        second = likelihood[:, 0] @ TOY["joint"]
        p = torch.stack([first, second], 1)
        return (p / p.sum(-1, keepdim=True)).log()

    return Stub(function)


NOISES = pytest.mark.parametrize("noise", ["absorb", "uniform"])


def kept_at(schedule: str, num_steps: int) -> dict[float, float]:
    """The kept share of z_(t+1), by a time that falls into step t."""
    kept = steps.kept_after(steps.RATES[schedule](num_steps)).tolist()
    return {(t + 0.5) / num_steps: kept[t + 1] for t in range(num_steps)}


@NOISES
@pytest.mark.parametrize("schedule", ["standard", "cosine"])
@pytest.mark.parametrize("num_steps", [1, 2, 5, 16])
def test_d3pm_with_a_constant_network(noise: str, schedule: str, num_steps: int) -> None:
    found = toy.make("d3pm", 4, noise=noise, schedule=schedule, num_steps=num_steps, hybrid=0.0)
    net = Stub(lambda z, time: PI.log().expand(*z.shape, -1))
    rows = list(every(noise, kept_at(schedule, num_steps), 1, 4, lambda t: 1 / num_steps))
    for token in range(4):
        nats = expected(found, net, rows, lambda x, token=token: (x[:, 0] == token).double())
        assert nats.item() == pytest.approx(-PI[token].log().item(), abs=1e-10)


@NOISES
@pytest.mark.parametrize("index", range(4))
def test_d3pm_with_exact_predictions_of_two_tokens(noise: str, index: int) -> None:
    num_steps = (2, 8, 32, 128)[index]
    kept = steps.kept_after(steps.standard_rates(num_steps))
    net = leave_one_out(noise, lambda time: kept[(time * num_steps / 1000).round().long()])
    found = toy.make("d3pm", 3, noise=noise, num_steps=num_steps)
    nats = expected(
        found, net, list(every(noise, kept_at("standard", num_steps), 2, 3, lambda t: 1 / num_steps)), joint
    )
    assert nats.item() == pytest.approx(TOY[f"d3pm_{noise}_T2_8_32_128"][index].item(), abs=1e-9)


def test_the_sum_of_all_steps_is_the_drawn_step_on_average() -> None:
    """bound authors: T passes, each with noise of its own, over T times the mean of single steps."""
    net = Stub(lambda z, time: PI.log().expand(*z.shape, -1) + 0.1 * z[..., None].sin())
    x, n = torch.randint(4, (20000, 3), generator=torch.Generator().manual_seed(0)), 20000
    for noise in ("absorb", "uniform"):
        one, all_ = (toy.make("d3pm", 4, noise=noise, num_steps=6, bound=bound) for bound in ("strict", "authors"))
        a, b = (f.terms(net, Batch(x), Randomness(3, 0, n), False)[0].nats.sum(1) for f in (one, all_))
        error = math.sqrt((a.var() + b.var()).item() / n)
        assert error < 0.02 * b.mean().item()
        assert abs((a.mean() - b.mean()).item()) < 5 * error  # normal: false alarm 6e-7


def nodes(count: int) -> dict[float, float]:
    """Times in (0, 1) and weights of a Gauss-Legendre rule."""
    t, w = np.polynomial.legendre.leggauss(count)
    return dict(zip(((t + 1) / 2).tolist(), (w / 2).tolist()))


def sedd_bound(noise: str, schedule: str, net: Stub, length: int, states: int, p_x: Callable, count: int) -> Tensor:
    """The expected strict bound of SEDD: its integral by quadrature, its last jump by enumeration."""
    found = toy.make("sedd", states, noise=noise, schedule=schedule)
    weights = nodes(count)
    low = math.exp(-found.sigma_at(found.t_min))
    if noise == "absorb":  # the strict bound draws the probability of a mask itself
        kept = {u: low * (1 - u) for u in weights}
    else:
        kept = {u: math.exp(-found.sigma_at(found.t_min + (1 - found.t_min) * u)) for u in weights}
    rows = list(every(noise, kept, length, states, weights.__getitem__))
    unchanged = torch.zeros(len(rows), length, dtype=torch.float64)
    total = expected(found, net, rows, p_x, jump=unchanged)
    jumps = list(every(noise, {0.5: low}, length, states, lambda t: 1.0))
    x, _, u, mass = columns(jumps)
    sigma = torch.full((len(x), 1), -math.log(low), dtype=torch.float64)
    told = Told(sigma, u, {})
    after = (found.nats(net, Batch(x), told, sigma, jump=True).sum(1) * mass * p_x(x)).sum()
    still = Told(sigma, torch.zeros_like(u), {})
    before = (found.nats(net, Batch(x), still, sigma, jump=True).sum(1) * mass * p_x(x)).sum()
    return total + after - before


def pi_scores(noise: str) -> Stub:
    """The scores of a single token from pi."""

    def function(z: Tensor, time: Tensor) -> Tensor:
        if noise == "absorb":
            return (PI.log() + math.log(4)).expand(*z.shape, -1)
        alpha = (-time).exp()[:, None, None]
        q = alpha * PI + (1 - alpha) / 4
        return q.log().expand(*z.shape, -1) - q.expand(*z.shape, -1).gather(-1, z[..., None]).log()

    return Stub(function)


@pytest.mark.parametrize(
    ("noise", "schedule"), list(itertools.product(["absorb", "uniform"], ["loglinear", "geometric"]))
)
def test_sedd_with_a_constant_network(noise: str, schedule: str) -> None:
    for token in (1, 3):
        exact = lambda x, token=token: (x[:, 0] == token).double()  # noqa: E731
        nats = sedd_bound(noise, schedule, pi_scores(noise), 1, 4, exact, 800).item()
        if (
            noise == "uniform"
        ):  # the chain starts from the uniform distribution, which z_1 from pi has not quite reached
            kept = math.exp(-toy.make("sedd", 4, noise=noise, schedule=schedule).sigma_at(1.0))
            last = torch.full((4,), (1 - kept) / 4, dtype=torch.float64)
            last[token] += kept
            nats -= (last * (4 * (kept * PI + (1 - kept) / 4)).log()).sum().item()
        assert nats == pytest.approx(-PI[token].log().item(), abs=1e-8)


def joint_scores(noise: str) -> Stub:
    """log p_t(z with y) / p_t(z) of two tokens; under absorbing noise log p(y | the other) + log 3."""

    def function(z: Tensor, time: Tensor) -> Tensor:
        if noise == "absorb":
            return leave_one_out(noise, lambda t: (-t).exp()).function(z, time) + math.log(3)
        alpha = (-time).exp()
        blur = alpha[:, None, None] * torch.eye(3, dtype=torch.float64) + (1 - alpha)[:, None, None] / 3
        p_t = blur @ TOY["joint"] @ blur.mT  # [R, 3, 3]
        row = torch.arange(len(z))
        here = p_t[row, z[:, 0], z[:, 1]].log()[:, None]
        return torch.stack([p_t[row, :, z[:, 1]].log() - here, p_t[row, z[:, 0]].log() - here], 1)

    return Stub(function)


@NOISES
def test_sedd_with_exact_scores_of_two_tokens(noise: str) -> None:
    nats = sedd_bound(noise, "auto", joint_scores(noise), 2, 3, joint, 60)
    assert nats.item() == pytest.approx(TOY[f"sedd_{noise}"].item(), abs=1e-5)
    assert nats.item() == pytest.approx(TOY["entropy"].item(), abs=1e-5)


COUNTS = "900 5 31 200 0"


@pytest.mark.parametrize("num_steps", [1, 2, 5, 16])
def test_diffusionbert_with_exact_predictions_of_one_token(num_steps: int) -> None:
    """That a token is still masked says something about it: pi_v (1 - k_t(v)). With this the bound is -log pi."""
    found = toy.make("diffusionbert", 4, num_steps=num_steps, token_counts=COUNTS, spindle=0.31)
    every_c, constant = found.weight_of(torch.arange(4)), 0.0
    for token in range(4):
        kept = {(t + 0.5) / num_steps: found.kept(torch.tensor(t + 1), every_c[token]).item() for t in range(num_steps)}
        rows = [row for row in every("absorb", kept, 1, 4, lambda t: 1 / num_steps) if row[0] == [token]]
        t = torch.tensor([int(row[1] * num_steps) for row in rows])[:, None]
        posterior = PI * (1 - found.kept(t + 1, every_c))
        exact = Stub(lambda z, time, p=posterior: (p / p.sum(-1, keepdim=True)).log()[:, None])
        certain = lambda x: torch.ones(len(x), dtype=torch.float64)  # noqa: E731
        assert expected(found, exact, rows, certain).item() == pytest.approx(-PI[token].log().item(), abs=1e-10)
        prior = Stub(lambda z, time: PI.log().expand(*z.shape, -1))
        constant += PI[token].item() * expected(found, prior, rows, certain).item()
    entropy = -(PI * PI.log()).sum().item()
    assert constant == pytest.approx(entropy, abs=1e-10) if num_steps == 1 else constant > entropy + 1e-3


def test_the_sum_of_diffusionberts_authors_is_no_bound() -> None:
    """The total weight of a token's nats, which a bound needs to be 1, depends on how frequent it is."""
    num_steps, c = 2048, TOY["diffusionbert_weight_c"]
    t = torch.arange(num_steps)[:, None]
    before, after = (spindle.spindle_kept(t + i, num_steps, 0.3, c) for i in (0, 1))
    total = ((1 - after) * spindle.authors_weight(t, num_steps, before)).sum(0)
    torch.testing.assert_close(total, TOY["diffusionbert_weight_T2048"], rtol=0, atol=1e-5)
    strict = ((1 - after) * steps.reveal_chance(before, after)).sum(0)
    torch.testing.assert_close(strict, torch.ones_like(strict), rtol=0, atol=1e-10)
    found = toy.make("diffusionbert", 4, num_steps=16, token_counts=COUNTS, bound="authors", hybrid=0.0)
    x = torch.randint(4, (6, 5), generator=torch.Generator().manual_seed(0))
    (term,) = found.terms(Stub(lambda z, _: PI.log().expand(*z.shape, -1)), Batch(x), Randomness(0, 0, 6), True)
    own = found.weight_of(x) - found.weight_of(x).mean(1, keepdim=True)
    t = (Randomness(0, 0, 6).at("time").times(torch.arange(6), 6) * 16).long()
    expected_nats = -16 * PI.log()[x] * spindle.authors_weight(t, 16, spindle.spindle_kept(t, 16, 0.3, own))
    hit = term.nats > 0
    assert 3 < hit.sum() < 30
    torch.testing.assert_close(term.nats[hit], expected_nats[hit])


# Samplers against enumerated chains.

DRAWS = 8000
SMALL = 3  # tokens; the mask is the next id


def chain_network(uniform: bool) -> Stub:
    """Logits that depend on both tokens and on the time."""
    table = torch.randn(2, 4, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def function(z: Tensor, time: Tensor | None) -> Tensor:
        tilt = 0.0 if time is None else (time / time.new_tensor(7.0)).sin()[:, None, None]
        found = table[:, z[:, 0], z[:, 1]].transpose(0, 1)
        return found + tilt * torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64)

    return Stub(function)


def logits_of(net: Stub, z: tuple[int, ...], time: float | None) -> Tensor:
    """Logits of both positions, [2, 3]."""
    told = None if time is None else torch.tensor([time], dtype=torch.float64)
    return net.function(torch.tensor([z]), told)[0]


def run_chain(
    start: dict[tuple[int, ...], float], transitions: list[Callable[[tuple[int, ...]], list[Tensor]]]
) -> dict[tuple[int, ...], float]:
    """The distribution after all steps; a transition gives a distribution [4] for each position."""
    now = start
    for step in transitions:
        after: dict[tuple[int, ...], float] = {}
        for z, mass in now.items():
            first, second = step(z)
            for a, b in itertools.product(range(4), repeat=2):
                p = mass * first[a].item() * second[b].item()
                if p > 0:
                    after[a, b] = after.get((a, b), 0.0) + p
        now = after
    return now


def sampled(found: Any, net: Stub, known: dict[int, int], **options: Any) -> list[tuple[int, ...]]:
    """Texts of two tokens."""
    x, given = torch.full((DRAWS, 2), SMALL), torch.zeros(DRAWS, 2, dtype=torch.bool)
    for position, token in known.items():
        x[:, position], given[:, position] = token, True
    request = toy.request(x, given, torch.ones_like(given), **options)
    rng = Randomness(11, 0, DRAWS)
    out = x.clone()
    for step in found.sample(net, request, found.plan(request, rng), rng):
        row, column = step.drawn.nonzero(as_tuple=True)
        out[row, step.position[row, column]] = step.token[row, column]
    return [tuple(text) for text in out.tolist()]


def check_chain(
    found: Any, net: Stub, transition: Callable, prior: Tensor, count: int, known: dict[int, int], **options: Any
) -> None:
    """transition(k, z, logits [2, 3]) -> distributions [4] of both positions."""
    each = [{known[i]: 1.0} if i in known else {v: p for v, p in enumerate(prior.tolist()) if p} for i in range(2)]
    start = {(a, b): each[0][a] * each[1][b] for a in each[0] for b in each[1]}

    def held(k: int) -> Callable[[tuple[int, ...]], list[Tensor]]:
        def step(z: tuple[int, ...]) -> list[Tensor]:
            moved = transition(k, z)
            fixed = torch.eye(4, dtype=torch.float64)
            return [fixed[z[i]] if i in known else moved[i] for i in range(2)]

        return step

    law = run_chain(start, [held(k) for k in range(count)])
    assert all(SMALL not in text for text in law)
    assert chance.chance(sampled(found, net, known, num_steps=count, **options), law) > chance.ALARM


def target_of(noise: str) -> Tensor:
    share = [0, 0, 0, 1] if noise == "absorb" else [1 / 3, 1 / 3, 1 / 3, 0]
    return torch.tensor(share, dtype=torch.float64)


GIVEN = pytest.mark.parametrize("known", [{}, {1: 2}], ids=["free", "given"])


@NOISES
@GIVEN
@pytest.mark.parametrize("sampler", ["ancestral", "greedy_tail"])
def test_d3pm_samples_its_chain(noise: str, known: dict[int, int], sampler: str) -> None:
    """Three steps through a process of seven, so that some are skipped."""
    found, net = toy.make("d3pm", SMALL, noise=noise, num_steps=7), chain_network(noise == "uniform")
    index, target = [7, 5, 2, 0], target_of(noise)
    kept = steps.kept_after(steps.standard_rates(7))

    def transition(k: int, z: tuple[int, ...]) -> list[Tensor]:
        p = torch.nn.functional.pad(logits_of(net, z, 1000 * index[k] / 7).softmax(-1), (0, 1))
        before, after = kept[index[k + 1]], kept[index[k]]
        ratio, at = (after / before).expand(2), before.expand(2)
        moved = steps.posterior(torch.tensor(z), p, ratio, at, target)
        if sampler == "greedy_tail" and k == 2:
            moved = torch.nn.functional.one_hot(moved.argmax(-1), 4).double()
        return list(moved)

    check_chain(found, net, transition, target, 3, known, sampler=sampler)


@GIVEN
def test_diffusionbert_samples_its_chain(known: dict[int, int]) -> None:
    found = toy.make("diffusionbert", SMALL, num_steps=7, token_counts="900 5 31 0")
    net, index = chain_network(False), [7, 5, 2, 0]
    c = found.weight_of(torch.arange(3))

    def transition(k: int, z: tuple[int, ...]) -> list[Tensor]:
        p = logits_of(net, z, None).softmax(-1)
        before, after = (spindle.spindle_kept(torch.tensor(index[j]), 7, 0.3, c) for j in (k + 1, k))
        moved = []
        for i in range(2):
            shown = p[i] * (before - after) / (1 - after)
            masked = torch.cat([shown, 1 - shown.sum(0, keepdim=True)])
            moved.append(masked if z[i] == SMALL else torch.eye(4, dtype=torch.float64)[z[i]])
        return moved

    check_chain(found, net, transition, target_of("absorb"), 3, known)


@NOISES
@GIVEN
@pytest.mark.parametrize("sampler", ["euler", "analytic"])
def test_sedd_samples_its_chain(noise: str, known: dict[int, int], sampler: str) -> None:
    """By matrix exponentials of the generator; negative weights count as zero."""
    found, net = toy.make("sedd", SMALL, noise=noise), chain_network(noise == "uniform")
    t = torch.linspace(1, 1e-5, 4, dtype=torch.float64)
    sigma = [found.sigma_at(v) for v in t.tolist()]
    generator = target_of(noise)[:, None] - torch.eye(4, dtype=torch.float64)  # dq/dsigma = generator q
    if noise == "uniform":
        generator[3] = generator[:, 3] = 0

    def transition(k: int, z: tuple[int, ...]) -> list[Tensor]:
        logits, last = logits_of(net, z, sigma[k]), k == 3
        moved = []
        for i in range(2):
            s = logits[i] - (math.log(math.expm1(sigma[k])) + math.log(3)) if noise == "absorb" else logits[i]
            score = torch.cat([s.exp(), torch.zeros(1, dtype=torch.float64)])
            score[z[i]] = 1.0
            if sampler == "euler" and not last:
                rate = found.times.dsigma(t[k]) * (t[k] - t[k + 1])
                weight = rate * generator[z[i]] * score  # rates from y to z, reversed
                weight[z[i]] = 0
                weight[z[i]] = 1 - weight.sum()
            else:
                d = sigma[k] - (0 if last else sigma[k + 1])
                weight = (torch.linalg.matrix_exp(-d * generator) @ score) * torch.linalg.matrix_exp(d * generator)[
                    z[i]
                ]
            if last and noise == "absorb":
                weight[SMALL] = 0
            weight = weight.clamp_min(0)
            moved.append(weight / weight.sum() if z[i] != SMALL or noise == "absorb" else weight)
        if noise == "absorb":
            moved = [torch.eye(4, dtype=torch.float64)[z[i]] if z[i] != SMALL else moved[i] for i in range(2)]
        return moved

    check_chain(found, net, transition, target_of(noise), 4, known, sampler=sampler)
