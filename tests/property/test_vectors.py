"""Diffusion-LM on one-dimensional embeddings of three words, whose likelihood, bounds and samples are integrals over a
grid. The grid knows the forward and the reverse chain, one step at a time, and none of the closed forms.

Shapes: G points of the grid, T steps, B batch.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm.core import vectors
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.vectors import GaussianSteps, StrictBound, sqrt_steps
from esolm.core.visibility import full
from esolm.net.denoiser import Denoiser
from esolm.net.head import VectorPass
from support import toy
from support.chance import ALARM, chance

T, V, MASK = 4, 4, 3
GRID = torch.linspace(-9, 9, 721, dtype=torch.float64)
CELL = float(GRID[1] - GRID[0])
ZERO, ONE = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
KINDS = ("small", "word")


def density(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.exp(log_density(x, mean, variance))


def log_density(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((x - mean) ** 2 / variance + torch.log(2 * math.pi * variance))


def network(seed: int = 5) -> Denoiser:
    """A network whose predictions depend on its input and on the time."""
    net = toy.network(V, 1, seed=seed, latent_width=1)
    with torch.no_grad():
        net.embed.weight.copy_(torch.tensor([[-1.4], [0.3], [1.2], [0.2]]))
        net.head.bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        net.down[2].weight.mul_(2)
    return net


class Line:
    """All integrals of one network, for words 0, 1, 2."""

    def __init__(self, net: Denoiser, steps: GaussianSteps, kind: Any = "small", clamp: bool = False) -> None:
        self.steps, self.variance = steps, steps.variance(kind)
        self.table = net.embed.weight.detach()
        with torch.no_grad():
            logits = GRID[:, None] @ self.table.T + net.head.bias
        self.rounding = logits[:, :MASK].log_softmax(-1)  # log p(w | start), [G, 3]
        index = [int((T_KEPT - kept).abs().argmin()) for kept in steps.kept]
        self.predicted = [self.predictions(net, 1000 * t / T, clamp) for t in index]

    def predictions(self, net: Denoiser, time: float, clamp: bool) -> Tensor:
        """The predicted start for every x_t on the grid, [G]."""
        x = torch.zeros(len(GRID), 1, dtype=torch.long)
        score = VectorPass(lambda clean: GRID[:, None, None], lambda clean, predicted, head: predicted, 1)
        times = torch.full((len(x),), time, dtype=torch.float64)
        with torch.no_grad():
            found = net(x, torch.zeros(1, 1, dtype=torch.long), full(1), time=times, score=score)[:, 0]
        if not clamp:
            return found
        return self.table[(found[:, None] - self.table[:MASK, 0]).abs().argmin(1), 0]

    def reverse(self, t: int) -> Tensor:
        """The mean of x_(t-1) for every x_t, [G]."""
        return self.steps.of_start[t] * self.predicted[t] + self.steps.of_noisy[t] * GRID

    def forward(self, t: int) -> tuple[Tensor, Tensor]:
        """Weight and variance of one forward step into x_t."""
        return (1 - self.steps.beta[t]).sqrt(), self.steps.beta[t]

    def likelihood(self) -> Tensor:
        """p(w) by the reverse chain, [3]."""
        law = density(GRID, ZERO, ONE)
        for t in range(len(self.predicted) - 1, -1, -1):
            law = (density(GRID[:, None], self.reverse(t), self.variance[t]) * law * CELL).sum(1)
        return (law[:, None] * self.rounding.exp()).sum(0) * CELL

    def bound(self, word: int) -> float:
        """E of log q(start, x_0, …, x_(T-1) | w) - log p(w, start, x_0, …, x_(T-1)), pair by pair."""
        mean, variance = self.table[word, 0], self.steps.start_variance
        law = density(GRID, mean, variance)
        total = float((law * (log_density(GRID, mean, variance) - self.rounding[:, word])).sum() * CELL)
        for t in range(len(self.predicted)):
            weight, own = self.forward(t)
            step = density(GRID, weight * GRID[:, None], own)  # x_(t-1) -> x_t, [G, G]
            back = log_density(GRID[:, None], self.reverse(t), self.variance[t])
            pair = law[:, None] * step * CELL**2
            total += float((pair * (log_density(GRID, weight * GRID[:, None], own) - back)).sum())
            law = (law[:, None] * step).sum(0) * CELL
        return total - float((law * log_density(GRID, ZERO, ONE)).sum() * CELL)

    def marginal(self, word: int, t: int) -> Tensor:
        """The law of x_t given the word, [G]."""
        kept = self.steps.kept[t]
        return density(GRID, kept.sqrt() * self.table[word, 0], kept * self.steps.start_variance + 1 - kept)


T_KEPT = sqrt_steps(T).kept


@pytest.fixture(scope="module")
def net() -> Denoiser:
    return network()


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_strict_bound_is_the_integral_over_chains(net: Denoiser, kind: Any, clamp: bool) -> None:
    """Closed forms against the grid, and a bound: below it is -log p(w), and the p(w) add up to 1."""
    line = Line(net, sqrt_steps(T), kind, clamp)
    p, ours = line.likelihood(), StrictBound(line.steps, kind)
    assert p.sum().item() == pytest.approx(1, abs=1e-9)
    for word in range(MASK):
        clean = line.table[word].expand(len(GRID), 1)
        law = density(GRID, clean[:, 0], line.steps.start_variance)
        nats = -(law * line.rounding[:, word]).sum() * CELL + ours.spread + ours.prior_nats(clean)[0]
        for t in range(T):
            steps = torch.full((len(GRID),), t)
            each = ours.mean_nats(steps, clean, GRID[:, None], line.predicted[t][:, None])
            nats += (line.marginal(word, t) * each).sum() * CELL
        wanted = line.bound(word)
        assert nats.item() == pytest.approx(wanted, abs=1e-7)
        assert wanted > -math.log(p[word]) + 0.01


def test_the_variance_of_the_word_costs_nothing_in_itself() -> None:
    for count in (4, 200, 2000):
        small, word = (StrictBound(sqrt_steps(count), kind).spread for kind in KINDS)  # type: ignore[arg-type]
        assert word == pytest.approx(0, abs=1e-12)
        assert 0.02 < small < 0.07


def test_the_authors_bound_is_looser(net: Denoiser) -> None:
    """Its expectation on the grid: the other steps have the same sum as ours, step 0 costs more."""
    line = Line(net, sqrt_steps(T))
    for word in range(MASK):
        clean, start = line.table[word], GRID[:, None]
        law = density(GRID, clean, line.steps.start_variance)
        total = -(law * line.rounding[:, word]).sum() * CELL
        for t in range(T):
            kept = line.steps.kept[t]
            pair = law[:, None] * density(GRID, kept.sqrt() * start, 1 - kept) * CELL**2  # start, x_t
            steps = torch.full((len(GRID),), t)
            for column in range(0, len(GRID), 20):  # every x_t would take long
                predicted = line.predicted[t][column].expand(len(GRID), 1)
                each, prior = vectors.authors_terms(line.steps, steps, clean.expand(len(GRID), 1), start, predicted)
                total += 20 * (pair[:, column] * each).sum()
        total += (law * prior).sum() * CELL
        assert total.item() > line.bound(word) + 0.1


def test_step_zero_of_the_authors_bound_in_float64() -> None:
    """A prediction without error costs the divergence of two Gaussians of different variance."""
    steps, zero = sqrt_steps(T), torch.zeros(1, 7, dtype=torch.float64)
    nats, _ = vectors.authors_terms(steps, torch.tensor([0]), zero, zero, zero)
    ratio = (steps.start_variance / steps.posterior[1]).item()
    assert nats.item() == pytest.approx(3.5 * (ratio - 1 - math.log(ratio)), rel=1e-13)


def mean_and_error(nats: Tensor) -> tuple[float, float]:
    return nats.mean().item(), nats.std().item() / math.sqrt(len(nats))


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_system_estimates_the_bound_without_bias(net: Denoiser, kind: str, clamp: bool) -> None:
    """Within 5 standard errors over 2000 draws of each word: a false alarm in less than one of 1e5 such tests."""
    system = toy.make("diffusion_lm", MASK, num_steps=T, latent_width=1, variance=kind, clamp=clamp)
    line, draws = Line(net, sqrt_steps(T), kind, clamp), 2000
    x = torch.arange(MASK).repeat(draws)[:, None]
    rng = Randomness(1, 0, len(x))
    for terms in (
        system.terms(net, Batch(x), rng, False),
        system.bound_over_times(net, Batch(x), rng, True),
    ):
        nats = sum(term.nats for term in terms)[:, 0].detach()
        for word in range(MASK):
            mean, error = mean_and_error(nats[word::MASK])
            assert error < 0.3
            assert abs(mean - line.bound(word)) < 5 * error


def test_the_authors_bound_of_the_system_is_the_sum_of_all_steps(net: Denoiser) -> None:
    """It exceeds the strict one by more than 5 standard errors; each step has noise of its own, and one start."""
    options = {"num_steps": T, "latent_width": 1}
    system = toy.make("diffusion_lm", MASK, bound="authors", **options)
    x = torch.arange(MASK).repeat(500)[:, None]
    rng, calls = Randomness(1, 0, len(x)), []

    def counted(*inputs: Any, **more: Any) -> Tensor:
        calls.append((more["score"].feed(torch.zeros(len(x), 1, 1, dtype=torch.float64)), more["time"][0].item()))
        return net(*inputs, **more)

    with torch.no_grad():
        terms = {term.name: term.nats[:, 0] for term in system.terms(counted, Batch(x), rng, False)}
        strict = {
            term.name: term.nats[:, 0]
            for term in toy.make("diffusion_lm", MASK, **options).terms(net, Batch(x), rng, False)
        }
    assert [time for _, time in calls] == [0, 250, 500, 750]
    steps = sqrt_steps(T)
    start = steps.start_variance.sqrt() * system._normal(x, rng.at("start"), torch.float64)[:, 0, 0]
    noise = torch.stack([x_t[:, 0, 0] - kept.sqrt() * start for (x_t, _), kept in zip(calls, steps.kept)])
    assert (torch.corrcoef(noise) - torch.eye(T)).abs().max() < 0.2
    assert (noise.var(1) - (1 - steps.kept)).abs().max() < 0.2
    torch.testing.assert_close(terms["rounding"], strict["rounding"])
    mean, error = mean_and_error(sum(terms.values()) - sum(strict.values()))
    assert mean > 5 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, T])
@pytest.mark.parametrize("sampler", ["clamped", "ancestral", "ddim"])
def test_samples_follow_the_reverse_chain(net: Denoiser, sampler: str, count: int, kind: Any) -> None:
    """The law of the words on the grid; the last step has no noise, and fewer steps skip some."""
    system = toy.make("diffusion_lm", MASK, num_steps=T, latent_width=1, variance=kind)
    index = torch.linspace(T - 1, 0, count).round().long().flip(0)
    line = Line(net, sqrt_steps(T).respaced(index), kind, sampler == "clamped")
    law = density(GRID, ZERO, ONE)
    last: Tensor = GRID  # the start that each point of the grid leads to
    if sampler == "ddim":
        for t in range(count - 1, -1, -1):
            predicted = torch.from_numpy(interpolated(last, line.predicted[t]))
            last = vectors.ddim_step(line.steps, t, last, predicted)
    else:
        for t in range(count - 1, 0, -1):
            law = (density(GRID[:, None], line.reverse(t), line.variance[t]) * law * CELL).sum(1)
        last = line.predicted[0]
    with torch.no_grad():
        words = (last[:, None] * line.table[:MASK, 0] + net.head.bias[:MASK]).argmax(-1)
    wanted = {word: float(law[words == word].sum() * CELL) for word in range(MASK)}
    draws = 4000
    blank = torch.zeros(draws, 1, dtype=torch.long)
    asked = toy.request(blank, blank.bool(), ~blank.bool(), sampler=sampler, num_steps=count)
    rng = Randomness(8, 0, draws)
    with torch.inference_mode():
        *_, step = system.sample(net, asked, system.plan(asked, rng), rng)
    assert sum(wanted.values()) == pytest.approx(1, abs=1e-6)
    assert max(wanted.values()) < 0.99
    assert chance(step.token[:, 0].tolist(), {word: p / sum(wanted.values()) for word, p in wanted.items()}) > ALARM


def interpolated(x: Tensor, values: Tensor) -> Any:
    import numpy as np

    return np.interp(x.numpy(), GRID.numpy(), values.numpy())


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 1}, {"latent_width": 0}, {"variance": "large"}, {"bound": "loose"}],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        toy.make("diffusion_lm", MASK, **options)


def test_what_it_cannot_do_is_named(net: Denoiser) -> None:
    system = toy.make("diffusion_lm", MASK, num_steps=T, latent_width=1)
    blank = torch.zeros(2, 1, dtype=torch.long)
    for wrong in (
        {"num_steps": T + 1}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 2}, {"cache": "prefix"}, {"order": (0,)},
        {"given_order": "random"}, {"sampler": "speculative"},
    ):  # fmt: skip
        asked = toy.request(blank, blank.bool(), ~blank.bool(), **wrong)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            system.plan(asked, Randomness(0))
    with pytest.raises(ValueError, match="authors"):
        toy.make("diffusion_lm", MASK, bound="authors", variance="word")
    with pytest.raises(ValueError, match="latent_width"):
        system.terms(toy.network(V, 1), Batch(blank), Randomness(0, 0, 2), True)
    asked = toy.request(blank, blank.bool(), ~blank.bool())
    with pytest.raises(ValueError, match="latent_width"):
        next(system.sample(toy.network(V, 1), asked, system.plan(asked, Randomness(0)), Randomness(0)))
    with pytest.raises(ValueError, match="diffusion_lm"):
        system.logits(net, Batch(blank))


class Fed:
    """A network that passes every call on, and keeps what was fed."""

    def __init__(self, net: Denoiser) -> None:
        self.net, self.vectors = net, []  # type: ignore[var-annotated]

    def __call__(self, x: Tensor, *inputs: Any, score: VectorPass, **more: Any) -> Tensor:
        def feed(clean: Tensor) -> Tensor:
            self.vectors.append((clean, score.feed(clean)))
            return self.vectors[-1][1]

        return self.net(x, *inputs, score=VectorPass(feed, score.result, score.columns), **more)


@pytest.mark.parametrize("train", [True, False])
def test_given_tokens_are_fed_without_noise(train: bool) -> None:
    """In training and in the bound; all others are fed with noise."""
    system = toy.make("diffusion_lm", 6, num_steps=9, latent_width=5)
    fed, x = Fed(toy.fitting(system)), toy.text(3)
    given = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    system.terms(fed, Batch(x, None, given), Randomness(1, 0, 3), train)
    ((clean, noisy),) = fed.vectors
    assert torch.equal(noisy[given], clean[given])
    assert (noisy != clean)[~given].all()


def test_samples_keep_given_tokens_clean_and_have_new_noise_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    system = toy.make("diffusion_lm", 6, num_steps=9, latent_width=40)
    net, x = toy.fitting(system), toy.text(3)
    given = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    asked = toy.request(x, given, torch.ones_like(given), sampler="ancestral", num_steps=9)
    fed, spreads = Fed(net), []
    step = vectors.ancestral_step

    def kept(steps: GaussianSteps, t: int, noisy: Tensor, predicted: Tensor, spread: Tensor) -> Tensor:
        spreads.append(spread)
        return step(steps, t, noisy, predicted, spread)

    monkeypatch.setattr(vectors, "ancestral_step", kept)
    monkeypatch.setattr("esolm.systems.diffusion_lm.embedder", lambda _: net)
    with torch.inference_mode():
        assert len(list(system.sample(fed, asked, system.plan(asked, Randomness(0)), Randomness(0)))) == 9
    for clean, noisy in fed.vectors:
        assert torch.equal(noisy[given], clean[given])
        assert (noisy != clean)[~given].all()
    noise = torch.stack(spreads).flatten(1)
    assert not noise[-1].any()
    assert (torch.corrcoef(noise[:-1]) - torch.eye(8)).abs().max() < 0.2  # 960 numbers: six standard errors
    deviations = sqrt_steps(9).variance("small").sqrt().flip(0)
    torch.testing.assert_close(noise.std(1)[:-1], deviations[:-1], rtol=0.15, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_knows_the_words_pays_for_the_variances_only(kind: Any) -> None:
    """It predicts the mean of the start given x_t and the word, in whatever step; padding and given tokens too."""
    width, steps = 3, sqrt_steps(9)
    system = toy.make("diffusion_lm", 6, num_steps=9, latent_width=width, variance=kind)
    net, x = toy.fitting(system), toy.text(40)
    valid, given = toy.padding(40, 8), torch.arange(8).expand(40, -1) < 2
    scored = valid & ~given

    def knowing(x: Tensor, *_: Any, time: Tensor, out: Any, score: VectorPass) -> Tensor:
        clean = net.embed(x)
        noisy, t = score.feed(clean), (time * 9 / 1000).round().long()
        kept = steps.kept[t][:, None, None]
        precision = 1 / steps.start_variance + kept / (1 - kept)
        mean = (clean / steps.start_variance + kept.sqrt() * noisy / (1 - kept)) / precision
        return score.result(clean[scored], mean[scored], net.head)  # type: ignore[arg-type]

    for independent in (False, True):
        terms = system.bound_over_times(knowing, Batch(x, valid, given), Randomness(1, 0, 40), independent)
        wanted = torch.where(scored, width * StrictBound(steps, kind).spread, 0.0)
        torch.testing.assert_close(terms[0].nats, wanted.double(), rtol=1e-9, atol=1e-9)
