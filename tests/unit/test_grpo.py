"""The parts of GRPO: ratios of the first update, clipping, advantages, estimators, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.tune.estimators import Estimator
from esolm.tune.grpo import GrpoObjective, advantages, shared, surrogate
from esolm.tune.options import Grpo, Rollout
from support import toy
from support.naive import run

V = 6
MASK = V - 1
NET = toy.network(V, toy.LENGTH + 1, torch.float32)
SYSTEMS: dict[str, Any] = {
    "B": toy.make("esolm", MASK, alpha_0=0.5),
    "any-shift": toy.make("esolm", MASK, alpha_0=0.5, loss="any_order", query="shift"),
    "mdlm": toy.make("mdlm", MASK),
    "ar": toy.make("ar", MASK),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "ancestral": {"num_steps": 3},
    "first_hitting": {},
    "block": {"parallelism": 3},
    "left_to_right": {},
    "order": {"order": torch.arange(8).flip(0)[None]},
    "speculative": {},
}
CASES = [(kind, name) for kind, system in SYSTEMS.items() for name in SAMPLERS if name in system.samplers]


def rolled(kind: str, name: str, **more: Any) -> tuple[Batch, Any]:
    lengths = torch.tensor([8, 5, 8, 6])
    valid = torch.arange(8) < lengths[:, None]
    given = torch.arange(8) < torch.tensor([0, 2, 3, 0])[:, None]
    request = toy.request(toy.text(4, 8, V), given & valid, valid, sampler=name, **SAMPLERS[name], **more)
    x, schedule, _ = run(SYSTEMS[kind], NET, request, Randomness(3, 0, 4))
    return Batch(torch.where(valid, x, 0), valid, given & valid), schedule


@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_ratios_of_the_first_update_are_exactly_one(kind: str, name: str, ratio: str) -> None:
    batch, schedule = rolled(kind, name, temperature=0.9)
    options = Grpo(ratio=ratio, clip=0.0, beta=0.0)
    advantage = torch.tensor([1.0, -2.0, 0.5, 3.0])
    objective = GrpoObjective(options, Estimator(SYSTEMS[kind], temperature=0.9), schedule, advantage)
    for _ in range(2):  # also when it is computed again from the stored ones
        (term,) = objective.terms(NET, batch, Randomness(3, 0, 4), True)
        drawn, number = batch.scored, batch.scored.sum(1, keepdim=True)
        spread = -advantage[:, None] / (number if ratio != "token" else 1)
        assert torch.equal(term.nats, torch.where(drawn, spread, 0.0))
    assert objective.sums["clipped"] == 0


def test_parts_of_a_batch_use_their_own_rows() -> None:
    batch, schedule = rolled("B", "ancestral")
    advantage = torch.tensor([1.0, -2.0, 0.5, 3.0])
    whole = GrpoObjective(Grpo(beta=0.0), Estimator(SYSTEMS["B"]), schedule, advantage)
    (expected,) = whole.terms(NET, batch, Randomness(0, 0, 8), True)
    parts = GrpoObjective(Grpo(beta=0.0), Estimator(SYSTEMS["B"]), schedule, advantage, first=4)
    found = [
        parts.terms(NET, batch.rows(torch.arange(i, i + 2)), Randomness(0, 4 + i, 8), True)[0].nats for i in (0, 2)
    ]
    torch.testing.assert_close(torch.cat(found), expected.nats)
    assert whole.old is not None
    torch.testing.assert_close(parts.old, whole.old)


def test_clipping() -> None:
    drawn = torch.tensor([[True, True, True, False]])
    old, new = torch.zeros(1, 4), torch.tensor([[0.5, -0.5, 0.1, 9.0]])
    for sign, expected, cut in (
        (1.0, [-1.2, -0.6065, -1.1052, 0.0], [True, False, False, False]),
        (-1.0, [1.6487, 0.8, 1.1052, 0.0], [False, True, False, False]),
    ):
        loss, clipped = surrogate(new, old, drawn, torch.tensor([sign]), Grpo())
        torch.testing.assert_close(loss, torch.tensor([expected]), rtol=1e-3, atol=1e-4)
        assert clipped[0].tolist() == cut
    loss, _ = surrogate(new, old, drawn, torch.tensor([1.0]), Grpo(clip_high=0.3))
    assert loss[0, 0].item() == pytest.approx(-1.3)
    loss, _ = surrogate(new, old, drawn, torch.tensor([1.0]), Grpo(ratio="sequence"))
    assert loss.sum().item() == pytest.approx(-1.1052, abs=1e-3)
    loss, _ = surrogate(new, old, drawn, torch.tensor([1.0]), Grpo(ratio="geometric"))
    assert loss.sum().item() == pytest.approx(-1.0339, abs=1e-3)


@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_leaves_the_gradient_finite(ratio: str, advantage: float) -> None:
    """A long sample may become e^200 times as likely in a few updates. Where clipping ends the gradient, it is zero."""
    new, old = torch.full((1, 100), -1.0, requires_grad=True), torch.full((1, 100), -3.0)
    new.data[0, 0], old[0, 0] = -1.0, -101.0
    drawn = torch.ones(1, 100, dtype=torch.bool)
    loss, _ = surrogate(new, old, drawn, torch.tensor([advantage]), Grpo(ratio=ratio))
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    assert advantage < 0 or not gradient.any()


def test_advantages() -> None:
    nan = float("nan")
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [1.0, nan, 3.0], [nan, 4.0, nan]])
    assert advantages(rewards, "raw").tolist() == [[1, 2, 3], [5, 5, 5], [1, 0, 3], [0, 4, 0]]
    assert advantages(rewards, "centred").tolist() == [[-1.5, 0, 1.5], [0, 0, 0], [-2, 0, 2], [0, 0, 0]]
    found = advantages(rewards, "normalised")
    torch.testing.assert_close(found[0], torch.tensor([-1.0, 0, 1]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[2], torch.tensor([-1.0, 0, 1]) / 2**0.5, rtol=1e-3, atol=1e-3)
    assert found[1:4:2].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_equal_texts_share_their_reward() -> None:
    rewards = torch.tensor([1.0, 0.5, 1.0, float("nan"), 1.0, 0.25])
    found = shared(rewards, ["a", "b", "a", "c", "a", "d"])
    torch.testing.assert_close(found, torch.tensor([1 / 3, 0.5, 1 / 3, float("nan"), 1 / 3, 0.25]), equal_nan=True)


def test_estimators() -> None:
    batch, schedule = rolled("B", "first_hitting")
    system, rng = SYSTEMS["B"], Randomness(0, 0, 4)
    exact = Estimator(system)(NET, batch, schedule, rng)
    one = Estimator(system, "onepass")(NET, batch, schedule, rng)
    assert not torch.allclose(exact, one)
    torch.testing.assert_close(Estimator(system, "stepmerge", 1)(NET, batch, schedule, rng), one)
    torch.testing.assert_close(Estimator(system, "stepmerge", 99)(NET, batch, schedule, rng), exact)
    bound = Estimator(system, "elbo", draws=3)(NET, batch, schedule, rng)
    assert bound.shape == exact.shape
    assert torch.equal(bound != 0, (bound != 0) & batch.scored)
    assert torch.equal(Estimator(system, "elbo", draws=3)(NET, batch, schedule, rng), bound)
    with pytest.raises(ValueError, match="elbo"):
        Estimator(system, "elbo", temperature=0.5)


def test_the_elbo_has_the_alpha_0_of_the_samples() -> None:
    batch, schedule = rolled("B", "first_hitting")
    rng, rollout = Randomness(0, 0, 4), Rollout(alpha_0=1.0)
    found = Estimator.of(Grpo(estimator="elbo"), SYSTEMS["B"], rollout)(NET, batch, schedule, rng)
    assert torch.equal(found, Estimator(SYSTEMS["B"].with_alpha_0(1.0), "elbo")(NET, batch, schedule, rng))
    assert not torch.allclose(found, Estimator(SYSTEMS["B"], "elbo")(NET, batch, schedule, rng))
    assert Estimator.of(Grpo(), SYSTEMS["B"], rollout) == Estimator(SYSTEMS["B"])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Rollout(sampler="confidence"), "confidence"),
        (lambda: Rollout(sampler="threshold"), "tokens drawn so far"),
        (lambda: Rollout(temperature=0.0), "greedy"),
        (lambda: Grpo(group=1), "group"),
        (lambda: Grpo(updates=0), "updates"),
        (lambda: Grpo(beta=-1.0), "beta"),
        (lambda: Grpo(clip=2.0), "clip"),
    ],
)
def test_options_that_cannot_be(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
