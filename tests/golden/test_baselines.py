"""Numbers that the authors' own code computed for the other systems of the paper's Table 1.

Every tensor of a file takes part, which the last line of each test checks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esolm.core import gaussian
from esolm.core.draw import Draw
from esolm.core.uniform import LogLinear, Uniform
from esolm.core.visibility import full
from esolm.interop.released import ReleasedCheckpoint, make_net
from esolm.sampling.chain import UniformReverse
from support.golden import DOUBLE, SINGLE, Golden, near, rows

HERE = Path(__file__).parent


def test_duo() -> None:
    d = Golden("duo")
    nelbo(d)
    transitions(d)
    curriculum(d)
    transform(d)
    assert d.read == d.keys()


def nelbo(d: Golden) -> None:
    schedule, t = LogLinear(), d["t"]
    near(schedule.alpha(t), d["nelbo.alpha"], DOUBLE)
    near(schedule.dalpha(t), d["nelbo.dalpha"], DOUBLE)
    near(-schedule.alpha(t).log(), d["nelbo.sigma"], DOUBLE)
    each = (schedule.alpha(t), schedule.dalpha(t))
    alpha, dalpha = (value[:, None].expand(d["x0"].shape).flatten() for value in each)
    found = Uniform(13).rate(rows(d["logits"]), rows(d["x0"]), rows(d["xt"]), alpha, dalpha)
    near(found, rows(d["nelbo.loss"]), DOUBLE)


def transitions(d: Golden) -> None:
    noise, schedule, z = Uniform(13), LogLinear(), rows(d["xt"])
    near(schedule.alpha(d["t"] - d["reverse.dt"]), d["reverse.alpha_s"], DOUBLE)
    near(schedule.alpha(d["t"]), d["reverse.alpha_t"], DOUBLE)
    alphas = (d["reverse.alpha_s"], d["reverse.alpha_t"])
    alpha_s, alpha_t = (a[:, None].expand(d["x0"].shape).reshape(-1, 1) for a in alphas)
    x_theta = rows(d["logits"]).softmax(-1)
    near(noise.posterior(x_theta, z, alpha_s, alpha_t / alpha_s), rows(d["reverse.probs"]), DOUBLE)
    clean = torch.nn.functional.one_hot(rows(d["x0"]), 13).double()
    near(noise.posterior(clean, z, alpha_s, alpha_t / alpha_s), rows(d["posterior.probs"]), DOUBLE)
    near(noise.posterior(x_theta, z, 1.0, alpha_t), rows(d["noise_removal.probs"]), DOUBLE)
    # Psi: a mixture of two of our distributions. The chapter's sampler itself is not part of esolm.
    forward = noise.marginal(noise.posterior(x_theta, z, 1.0, alpha_t), alpha_s)
    psi = 0.6 * noise.posterior(x_theta, z, alpha_s, alpha_t / alpha_s) + 0.4 * forward
    near(psi, rows(d["psi_kappa0.6.probs"]), DOUBLE)
    # What the sampler draws from, one example at a time: each has its own time.
    for b, (before, after) in enumerate(zip(d["reverse.alpha_t"].tolist(), d["reverse.alpha_s"].tolist())):
        for last, tail, name in ((after, False, "reverse"), (1.0, False, "noise_removal"), (1.0, True, "greedy")):
            reverse = UniformReverse(noise, Draw(), [before, last], [0.0], tail)
            weights = reverse.weights(0, d["logits"][b], d["xt"][b])
            if tail:
                assert torch.equal(weights.argmax(-1), d["greedy.tokens"][b])
                assert torch.equal(weights.sum(-1), torch.ones(10, dtype=torch.float64))
            else:
                near(weights, d[f"{name}.probs"][b], DOUBLE)


def curriculum(d: Golden) -> None:
    gamma, tau = d["curriculum.gamma"], 1 / d["curriculum.tau_inverse"].item()
    w = gaussian.latent(d["x0"], d["curriculum.eps"], gamma[:, None])
    near(w / tau, d["curriculum.network_input"], DOUBLE)
    near(gaussian.soften(w, tau), d["curriculum.soft_tokens"], DOUBLE)
    assert torch.equal(w.argmax(-1), d["curriculum.xt"])
    near(-d["curriculum.alpha"].log(), d["curriculum.sigma"], DOUBLE)
    values = (d["curriculum.alpha"], d["curriculum.dalpha"])
    alpha, dalpha = (value[:, None].expand(d["x0"].shape).flatten() for value in values)
    found = Uniform(13).rate(rows(d["logits"]), rows(d["x0"]), rows(d["curriculum.xt"]), alpha, dalpha)
    near(found, rows(d["curriculum.loss"]), DOUBLE)
    # The authors look alpha up in a table of 100,000 points and take a forward difference of it.
    near(gaussian.alpha(gamma, 13), d["curriculum.alpha"], 5e-5)
    near(1.75 * gaussian.dalpha(gamma, 13), d["curriculum.dalpha"], 1e-3)


def transform(d: Golden) -> None:
    t = d["transform.t"]
    for name, low, high in (("bert", -3.5, -1.75), ("gpt2", -3.55, -1.85)):
        size, gamma = int(d[f"transform.{name}.vocab_size"]), d[f"transform.{name}.gamma"]
        near(low + (high - low) * t, gamma, DOUBLE)
        near(gaussian.alpha(gamma, size), d[f"transform.{name}.series_alpha"], DOUBLE)
        near((high - low) * gaussian.dalpha(gamma, size), d[f"transform.{name}.series_dalpha"], DOUBLE)
        near(gaussian.alpha(gamma, size), d[f"transform.{name}.alpha"], 5e-5)  # the shipped table
        near((high - low) * gaussian.dalpha(gamma, size), d[f"transform.{name}.dalpha_finite_difference"], 5e-3)
    for name, size in (("v13", 13), ("v50", 50)):  # by scipy's quad, which is good to 1e-9
        gamma, share = d[f"transform.{name}.gamma"], (size - 1) / size
        near(gaussian.alpha(gamma, size), d[f"transform.{name}.alpha"], 1e-8)
        near(share * gaussian.alpha(gamma, size) + 1 / size, d[f"transform.{name}.pt"], 1e-8)
        near(share * gaussian.dalpha(gamma, size), d[f"transform.{name}.dpt_dgamma"], 1e-8)


def test_duo_network() -> None:
    """A checkpoint with the authors' names converts to the authors' function of ids, of probabilities and of times."""
    d = Golden("duo_network")
    state = {name.removeprefix("weight."): d[name] for name in d if name.startswith("weight.")}
    net = make_net(ReleasedCheckpoint(HERE, state, {"model.length": 8}, None))
    assert (net.config.width, net.config.heads, net.config.cond_width, net.config.vocab_size) == (32, 2, 16, 13)
    position, seen, sigma = torch.arange(8)[None], full(8), d["sigma"]
    near(net.condition(sigma)[:, 0], d["condition"], SINGLE)
    near(net(d["tokens"], position, seen, sigma), d["logits_tokens"], SINGLE)
    near(d["soft_input"].softmax(-1), d["soft_tokens"], SINGLE)
    near(net(d["soft_tokens"], position, seen, sigma), d["logits_soft"], SINGLE)
    some = torch.zeros(3, 8, 13).scatter_add_(-1, d["topk_index"], d["topk_weight"])
    near(net(some, position, seen, sigma), d["logits_topk"], SINGLE)
    assert d.read == d.keys()


def test_a_wrong_number_of_states_is_noticed() -> None:
    """The tolerance is a test only if a mistake fails it."""
    d = Golden("duo")
    alpha, dalpha = (d[f"nelbo.{name}"][:, None].expand(4, 10).flatten() for name in ("alpha", "dalpha"))
    found = Uniform(14).rate(rows(d["logits"]), rows(d["x0"]), rows(d["xt"]), alpha, dalpha)
    with pytest.raises(AssertionError):
        near(found, rows(d["nelbo.loss"]), DOUBLE)
