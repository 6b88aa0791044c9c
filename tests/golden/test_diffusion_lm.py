"""Numbers that the authors' own code computed for Diffusion-LM. Every tensor of the file takes part.

Shapes: B batch, L length, D width of an embedding, T steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from esolm.core import vectors
from esolm.core.vectors import sqrt_steps
from esolm.systems.diffusion_lm import DiffusionLM
from support.golden import DOUBLE, SINGLE, Golden, near, rows

T = 20


def test_diffusion_lm() -> None:
    d = Golden("diffusion_lm")
    schedule(d)
    process(d)
    training(d)
    one_step(d)
    bound(d)
    samplers(d)
    assert d.read == d.keys()


def schedule(d: Golden) -> None:
    for count in (20, 200, 2000):
        steps, name = sqrt_steps(count), f"schedule.T{count}"
        index = d[f"{name}.index"] if count == 2000 else torch.arange(count)
        near(steps.kept[index], d[f"{name}.alphas_cumprod"], DOUBLE)
        near(steps.beta[index], d[f"{name}.betas"], DOUBLE)
    steps = sqrt_steps(T)
    near(steps.posterior, d["posterior.variance"], DOUBLE)
    near(steps.variance("small").log(), d["posterior.log_variance_clipped"], DOUBLE)
    near(steps.of_start, d["posterior.mean_coef1"], DOUBLE)
    near(steps.of_noisy, d["posterior.mean_coef2"], DOUBLE)
    near(steps.start_variance.sqrt(), d["std"], DOUBLE)
    near(DiffusionLM(num_steps=T).time(d["t"]), d["network_time"], DOUBLE)


def clean(d: Golden) -> Tensor:
    return d["embedding"][d["ids"]]


def process(d: Golden) -> None:
    steps = sqrt_steps(T)
    near(clean(d) + steps.start_variance.sqrt().float() * d["x_noise"], d["x_start"], SINGLE)
    near(steps.noised(d["x_start"], d["t"][:, None], d["noise"]), d["x_t"], SINGLE)


def rounding(d: Golden, start: Tensor) -> Tensor:
    """-log p(w | start), [B, L]."""
    logits = start @ d["embedding"].T + d["head_bias"]
    return F.cross_entropy(logits.transpose(1, 2), d["ids"], reduction="none")


def row_terms(function, d: Golden, predicted: Tensor) -> list[Tensor]:
    """Terms of the tokens at the steps of the file, the mean over each sequence: [B]."""
    t = d["t"][:, None].expand(d["ids"].shape).flatten()
    found = function(sqrt_steps(T), t, rows(clean(d)), rows(d["x_start"]), rows(predicted))
    return [nats.view(d["ids"].shape).mean(1) for nats in found]


def training(d: Golden) -> None:
    mse, prior = row_terms(vectors.training_terms, d, d["model_output"])
    word = rounding(d, d["x_start"]).mean(1)
    near(mse, d["train.mse"], SINGLE)
    near(prior, d["train.tT_loss"], SINGLE)
    near(word, d["train.decoder_nll"], SINGLE)
    near(mse + prior + word, d["train.loss"], SINGLE)


def bits(nats: Tensor, d: Golden) -> Tensor:
    """Bits per dimension, as the authors count."""
    return nats / math.log(2) / d["embedding"].shape[1]


def clamped(d: Golden, predicted: Tensor) -> Tensor:
    return d["embedding"][vectors.nearest(rows(predicted), d["embedding"], None)].view_as(predicted)


def one_step(d: Golden) -> None:
    for kind, predicted in (("noclamp", d["model_output"]), ("clamp", clamped(d, d["model_output"]))):
        near(predicted, d[f"vb.{kind}.pred_xstart"], SINGLE)
        step, prior = row_terms(vectors.authors_terms, d, predicted)
        word = rounding(d, d["x_start"]).mean(1)
        near(bits(step, d), d[f"vb.{kind}.kl"], SINGLE)
        near(bits(prior, d), d[f"vb.{kind}.kl_T"], SINGLE)
        near(bits(word, d), d[f"vb.{kind}.decoder_nll"], SINGLE)
        near(bits(step + prior + word, d), d[f"vb.{kind}.output"], SINGLE)


def bound(d: Golden) -> None:
    steps = sqrt_steps(T)
    start = clean(d) + steps.start_variance.sqrt().float() * d["bound.x_noise"]
    columns = []
    for i, t in enumerate(range(T - 1, -1, -1)):
        t = torch.full(d["ids"].shape, t)
        predicted = steps.noised(start, t, d["bound.noise"][i]) @ d["bound.W"] + 0.01 * t[..., None] / T
        step, prior = vectors.authors_terms(steps, t.flatten(), rows(clean(d)), rows(start), rows(predicted))
        columns.append(bits(step.view(d["ids"].shape).mean(1), d))
    prior = bits(prior.view(d["ids"].shape).mean(1), d)
    near(prior, d["bound.prior_bpd"], SINGLE)
    found = torch.stack([prior, *columns, bits(rounding(d, start).mean(1), d)], 1)
    near(found, d["bound.vb"], SINGLE)
    near(found.sum(1), d["bound.total_bpd"], SINGLE)


def samplers(d: Golden) -> None:
    steps = sqrt_steps(T)
    for kind, predicted in (("noclamp", d["model_output"]), ("clamp", clamped(d, d["model_output"]))):
        for b, t in enumerate(d["t"].tolist()):
            noisy, noise = d["x_t"][b], d[f"sample.{kind}.noise"][b]
            spread = steps.posterior[t].sqrt().float() * noise
            mean = vectors.ancestral_step(steps, t, noisy, predicted[b], torch.zeros_like(noise))
            near(mean, d[f"sample.{kind}.mean"][b], SINGLE)
            near(vectors.ancestral_step(steps, t, noisy, predicted[b], spread), d[f"sample.{kind}.x_prev"][b], SINGLE)
            near(vectors.ddim_step(steps, t, noisy, predicted[b]), d[f"sample.{kind}.ddim"][b], SINGLE)
    tokens = vectors.nearest(rows(d["model_output"]), d["embedding"], None)  # the bias takes no part in it
    assert torch.equal(tokens, rows(d["rounding.tokens"]))
