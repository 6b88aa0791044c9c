"""The uniform process and its bound, by enumeration: a constant network, and the exact predictor of a 3 x 3 joint.

Shapes: N states, L length, B batch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esolm import systems
from esolm.core import gaussian
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness, uniform
from esolm.core.uniform import LogLinear, Uniform
from support import toy
from support.chance import ALARM, chance
from support.golden import Golden

PI = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
PLAIN = {name: systems.find(name)(mask_id=3) for name in systems.names()}
UNIFORM = [name for name, found in PLAIN.items() if not found.masks and found.latent_width is None]
"""Systems whose noise replaces tokens by others as they come, without options."""

SCHEDULES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "linear": (lambda t: 1 - t, lambda t: -1.0),
    "log-linear": (lambda t: 1 - 0.999 * t, lambda t: -0.999),
    "to a fifth": (lambda t: 1 - 0.8 * t, lambda t: -0.8),
    "cosine": (lambda t: math.cos(math.pi * t / 2), lambda t: -math.pi / 2 * math.sin(math.pi * t / 2)),
    "square": (lambda t: 1 - 0.99 * t * t, lambda t: -1.98 * t),
}
"""alpha_t and its derivative."""


def nodes(low: float, points: int) -> tuple[list[float], Tensor]:
    """Points t in [low, 1] and weights of an integral over t: Gauss-Legendre in log t."""
    node, weight = np.polynomial.legendre.leggauss(points)
    t = np.exp(-math.log(low) * (node - 1) / 2)
    return t.tolist(), torch.from_numpy(-math.log(low) / 2 * weight * t)


def each(value: float, rows: int) -> Tensor:
    return torch.full((rows,), value, dtype=torch.float64)


def token_bound(noise: Uniform, logits: Tensor, x: int, schedule: str, t_min: float) -> float:
    """The whole bound of one token under a constant prediction, with the expectation over z by enumeration."""
    alpha, dalpha = SCHEDULES[schedule]
    z = torch.arange(noise.vocab_size)
    if noise.exclude is not None:
        z = z[z != noise.exclude]
    rows = len(z)
    times, weight = nodes(t_min, 80)
    a, da = (torch.tensor([f(t) for t in times], dtype=torch.float64) for f in (alpha, dalpha))

    def q(alpha_t: Tensor) -> Tensor:
        return alpha_t[:, None] * (z == x).double() + (1 - alpha_t[:, None]) / noise.states

    every, clean = logits.expand(rows * len(times), -1), torch.full((rows * len(times),), x)
    at = (z.repeat(len(times)), a.repeat_interleave(rows), da.repeat_interleave(rows))
    rates = noise.rate(every, clean, *at).view(len(times), rows)
    first = each(alpha(t_min), rows)
    last = noise.last_jump(every[:rows], clean[:rows], z, first)
    return float(weight @ (q(a) * rates).sum(1)) + float(q(first[:1])[0] @ last) + noise.prior_nats(alpha(1.0))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("t_min", [1e-3, 0.3])
@pytest.mark.parametrize("exclude", [None, 1])
def test_a_constant_network_has_the_nats_of_its_prediction(schedule: str, t_min: float, exclude: int | None) -> None:
    """-log pi, for every schedule and cut-off; an excluded id is no state, whatever its logit.

    That is so if z_1 is distributed as the prior says. If alpha_1 > 0, the prediction means z_1 ~ m, which is
    alpha_1 pi + (1 - alpha_1) / N, and a uniform prior costs E[log N m(z_1)] more.
    """
    logits = PI.log() if exclude is None else torch.cat([PI.log()[:1], torch.tensor([7.0]), PI.log()[1:]])
    noise = Uniform(len(logits), exclude)
    ids = [i for i in range(len(logits)) if i != exclude]
    end = max(SCHEDULES[schedule][0](1.0), 0.0)
    m = end * PI + (1 - end) / 3
    for x, (token, p) in enumerate(zip(ids, PI.tolist())):
        q = end * torch.nn.functional.one_hot(torch.tensor(x), 3).double() + (1 - end) / 3
        expected = -math.log(p) + float(q @ (3 * m).log())
        assert end > 1e-9 or expected == pytest.approx(-math.log(p), abs=1e-9)
        assert token_bound(noise, logits, token, schedule, t_min) == pytest.approx(expected, abs=1e-9)


def test_the_integrand_of_a_uniform_prediction_has_a_closed_form() -> None:
    """-d/dt D(alpha_t) with D as in the prior term; and the authors' mean over [1e-3, 1] is below log N."""
    for size in (13, 30522):
        noise, schedule = Uniform(size), LogLinear()
        logits = torch.zeros(2, size, dtype=torch.float64)
        for t in (1e-3, 0.1, 0.5, 1.0):
            a, h = 1 - 0.999 * t, 1e-6
            alpha, x, z = each(a, 2), torch.tensor([3, 3]), torch.tensor([3, 4])
            nats = noise.rate(logits, x, z, alpha, schedule.dalpha(alpha))
            found = (a + (1 - a) / size) * nats[0] + (1 - a) * (size - 1) / size * nats[1]
            slope = 0.999 * (noise.prior_nats(a * (1 + h)) - noise.prior_nats(a * (1 - h))) / (2 * a * h)
            assert found.item() == pytest.approx(slope, rel=1e-4)
    low = (noise.prior_nats(1 - 0.999e-3) - noise.prior_nats(1e-3)) / 0.999
    assert low == pytest.approx(10.31574, abs=1e-5)  # the specification's value for 30522 states
    assert low < math.log(30522)


class Joint:
    """Two tokens of three states, whose predictors are exact."""

    def __init__(self) -> None:
        self.golden = Golden("toy")
        self.p = self.golden["joint"]
        self.noise = Uniform(3)

    def predicted(self, z: tuple[int, int], at: int, alpha: float, own: bool) -> Tensor:
        """p(x^at | the other noisy token), or with `own` also given the noisy token at its own place."""
        other = self.kernel(alpha)[:, z[1 - at]]
        found = self.p @ other if at == 0 else other @ self.p
        found = found * self.kernel(alpha)[:, z[at]] if own else found
        return found / found.sum()

    @staticmethod
    def kernel(alpha: float) -> Tensor:
        """q(z | x), [x, z]."""
        return alpha * torch.eye(3, dtype=torch.float64) + (1 - alpha) / 3

    def expected(self, alpha: float, function: Callable[..., Tensor], own: bool) -> float:
        """The expectation over x and z of the sum over both tokens."""
        states = list(itertools.product(range(3), repeat=2))
        kernel, total = self.kernel(alpha), 0.0
        mass = torch.einsum("ab,ac,bd->abcd", self.p, kernel, kernel).flatten()  # x, then z
        for at in (0, 1):
            logits = torch.stack([self.predicted(z, at, alpha, own).log() for z in states]).repeat(9, 1)
            clean, noisy = (torch.tensor([state[at] for state in states]) for _ in range(2))
            total += float(mass @ function(logits, clean.repeat_interleave(9), noisy.repeat(9)))
        return total

    def bound(self, own: bool, t_min: float) -> float:
        def rate(a: float) -> float:
            return self.expected(a, lambda *rows: self.noise.rate(*rows, each(a, 81), each(-0.999, 81)), own)

        times, weight = nodes(t_min, 48)
        first = 1 - 0.999 * t_min
        last = self.expected(first, lambda *rows: self.noise.last_jump(*rows, each(first, 81)), own)
        found = sum(w * rate(1 - 0.999 * t) for t, w in zip(times, weight.tolist()))
        return found + last + 2 * self.noise.prior_nats(1e-3)


def test_the_best_predictor_ignores_the_token_at_its_own_place() -> None:
    """The leave-one-out predictor reaches the entropy of a 3 x 3 joint, up to one jump of two tokens at once from
    t = 1e-6; the posterior, which counts that token's evidence twice, does not."""
    joint = Joint()
    entropy = joint.golden["entropy"].item()
    assert -(joint.p * joint.p.log()).sum().item() == pytest.approx(entropy, abs=1e-12)
    assert joint.golden["uniform_leave_one_out"].item() == pytest.approx(entropy, abs=1e-6)
    found = joint.bound(own=False, t_min=1e-6)
    assert found == pytest.approx(entropy, abs=2e-5)
    assert found >= entropy - 1e-9
    assert joint.bound(own=False, t_min=0.3) > entropy + 1e-3  # still a bound, and loose
    wrong = joint.golden["uniform_posterior"].item()
    assert joint.bound(own=True, t_min=1e-6) == pytest.approx(wrong, abs=0.02)
    assert wrong > entropy + 0.5


def constant(vocab_size: int, pi: Tensor) -> Any:
    net = toy.network(vocab_size)
    with torch.no_grad():
        net.head.weight.zero_()
        net.head.bias[:-1] = pi.log()
    return net


@pytest.mark.parametrize("name", UNIFORM)
def test_the_strict_bound_of_a_system_is_unbiased(name: str) -> None:
    """A constant network again, through `terms`: the mean over 682 examples of a token is within 5 standard errors of
    -log pi (false alarm below 1e-6 per token). The authors' estimator omits t < t_min: with t_min = 0.1 it is lower."""
    net, size, draws = constant(4, PI), 3, 1024
    x = torch.arange(draws * 2)[:, None] % size
    strict = toy.make(name, 3, t_min=0.1, eps=1e-6)
    nats = {}
    with torch.no_grad():
        for bound in ("strict", "authors"):
            found = toy.make(name, 3, t_min=0.1, eps=1e-6, bound=bound)
            (term,) = found.terms(net, Batch(x), Randomness(5, 0, len(x)), False)
            nats[bound] = term.nats[:, 0]
        (term,) = strict.bound_over_times(net, Batch(x), Randomness(5, 0, len(x)), True)
        nats["independent"] = term.nats[:, 0]
    for token, p in enumerate(PI.tolist()):
        mine = x[:, 0] == token
        for kind in ("strict", "independent"):
            some = nats[kind][mine]
            error = some.std().item() / math.sqrt(len(some))
            assert error < 0.1
            assert abs(some.mean().item() + math.log(p)) < 5 * error
    assert (nats["strict"].mean() - nats["authors"].mean()).item() > 0.1


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in UNIFORM), ("sedd", {"noise": "uniform"})])
def test_the_distance_from_the_prior_is_added_in_float64(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To every scored token, and to no other."""
    found, x = toy.make(name, 3, **options), torch.tensor([[0, 2, 1]])
    batch = Batch(x, None, torch.tensor([[True, False, False]]))
    nats = []
    for prior in (0.0, 1 / 3):
        monkeypatch.setattr(Uniform, "prior_nats", lambda noise, alpha, prior=prior: prior)
        nats.append(found.terms(toy.network(4, 3), batch, Randomness(0), False)[0].nats)
    wanted = torch.tensor([[0.0, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(nats[1] - nats[0], wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [3, 13])
@pytest.mark.parametrize("exclude", [None, 0, 2])
def test_noise_keeps_alpha_and_spreads_the_rest(size: int, exclude: int | None) -> None:
    noise, alpha = Uniform(size, exclude), 0.37
    u = uniform(11, torch.zeros(1, dtype=torch.long), torch.arange(30000))
    z = noise.corrupt(torch.ones_like(u, dtype=torch.long), torch.tensor(alpha), u)
    ids = [i for i in range(size) if i != exclude]
    expected = {i: alpha * (i == 1) + (1 - alpha) / noise.states for i in ids}
    assert chance(z.tolist(), expected) > ALARM
    one = torch.nn.functional.one_hot(torch.tensor([1]), size).double()
    assert dict(enumerate(noise.marginal(one, alpha)[0].tolist())) == pytest.approx(
        dict.fromkeys(range(size), 0.0) | expected
    )


def test_the_argmax_of_the_latents_follows_the_uniform_process() -> None:
    """Duo's z in training: clean with probability alpha + (1 - alpha) / N, otherwise any other state alike."""
    found = toy.make("duo", 5, curriculum_end=1, tau_start=1e-3)
    x, gamma = torch.ones(400, 50, dtype=torch.long), torch.full((400,), -0.5, dtype=torch.float64)
    given = torch.arange(50) < 2
    batch = Batch(x, None, given.expand(400, -1))
    soft, z = found.latents(batch, gamma, Randomness(3, 0, 400))
    assert torch.equal(soft.argmax(-1), z)
    assert torch.equal(z[:, :2], x[:, :2])
    assert torch.equal(soft[:, :2], torch.nn.functional.one_hot(x[:, :2], 6).to(soft.dtype))
    assert not soft[..., 5].any()
    alpha = gaussian.alpha(gamma[:1], 5).item()
    expected = {i: alpha * (i == 1) + (1 - alpha) / 5 for i in range(5)}
    assert chance(Counter(z[:, 2:].flatten().tolist()), expected) > ALARM
    assert 0.2 < alpha < 0.8


def test_the_gamma_range_spans_the_alphas_of_every_vocabulary() -> None:
    for vocabulary in (4, 4097, 50258):
        system = toy.make("duo", vocabulary - 1)
        found = gaussian.alpha(torch.tensor(system.gammas), vocabulary - 1)
        torch.testing.assert_close(found, torch.tensor([0.95, 0.05], dtype=torch.float64), rtol=0, atol=1e-6)
    assert toy.make("duo", 13, gamma_min=-3.5, gamma_max=-1.75).gammas == (-3.5, -1.75)
    with pytest.raises(ValueError, match="gamma_min"):
        toy.make("duo", 13, gamma_min=5.0).gammas  # noqa: B018


def test_the_curriculum_ends_and_its_temperature_moves_in_between() -> None:
    system = toy.make("duo", 5, curriculum_start=2, curriculum_end=6, tau_start=0.1, tau_end=0.001)
    taus = [system.at_step(step).tau_start for step in range(6)]
    assert taus == pytest.approx([0.1, 0.1, 0.1, 10**-1.5, 0.01, 10**-2.5])
    assert [system.at_step(step).curriculum_end > 0 for step in (0, 5, 6, 99)] == [True, True, False, False]
    plain = toy.make("duo", 5)
    net, x = toy.network(6), toy.text(4, vocab_size=6)
    rng = Randomness(0, 0, 4)
    assert torch.equal(
        toy.values(system.at_step(6), net, x, rng, True)["diffusion"], toy.values(plain, net, x, rng, True)["diffusion"]
    )
    soft = toy.values(system.at_step(0), net, x, rng, True)["diffusion"]
    assert not torch.allclose(soft, toy.values(plain, net, x, rng, True)["diffusion"])
    same = toy.values(toy.make("udlm", 5), net, x, rng, True)["diffusion"]
    assert torch.equal(same, toy.values(plain, net, x, rng, True)["diffusion"])


@pytest.mark.parametrize("options", [{"t_min": 0.0}, {"eps": 1.0}, {"bound": "loose"}])
@pytest.mark.parametrize("name", UNIFORM)
def test_wrong_options_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        toy.make(name, 5, **options)


def test_a_vocabulary_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        systems.find("udlm")(mask_id=3).noise  # noqa: B018
    for wrong in ({"curriculum_start": 3}, {"tau_end": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            toy.make("duo", 5, **wrong)
