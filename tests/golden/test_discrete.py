"""D3PM, SEDD and DiffusionBERT give the numbers of their authors' code (*.safetensors here).

The files hold inputs and results of the authors' own functions on a CPU, with the logits as an input; float32 results
are compared at 1e-5 and float64 ones at 1e-10, relative to the larger of 1 and the value.

Shapes: T steps, L length, B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esolm.core import score_entropy, spindle, steps
from esolm.core.score_entropy import GeometricNoise, LogLinearNoise
from esolm.core.uniform import Uniform
from support.golden import DOUBLE, SINGLE, Golden, near

FILES = {name: Golden(name) for name in ("d3pm", "sedd", "diffusionbert")}


def close(found: Tensor, expected: Tensor) -> None:
    """Equal within the tolerance of the file's type."""
    near(found, expected, DOUBLE if expected.dtype == torch.float64 else SINGLE)


class Part:
    """The tensors of a file below a prefix."""

    def __init__(self, file: str, prefix: str) -> None:
        self.file, self.prefix = FILES[file], prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.file[self.prefix + name]


def test_d3pm() -> None:
    for num_steps in (8, 1000):
        d3pm_schedules(num_steps)
    for case, size in CASES:
        d3pm(case, size)
    assert FILES["d3pm"].read == FILES["d3pm"].keys()


def d3pm_schedules(num_steps: int) -> None:
    golden = Part("d3pm", f"schedule.T{num_steps}.")
    for kind in ("standard", "cosine"):
        torch.testing.assert_close(steps.RATES[kind](num_steps), golden[f"{kind}_beta"], rtol=0, atol=1e-6)
    close(steps.kept_after(steps.standard_rates(num_steps)), golden["absorb_standard_alpha_bar"])
    close(steps.kept_after(steps.cosine_rates(num_steps)), golden["uniform_cosine_alpha_bar"])


CASES = [("absorb", 1), ("absorb", 2), ("uniform", 1), ("uniform", 2), ("uniform_cosine", 1)]


def d3pm(case: str, size: int) -> None:
    """All terms of the bound, with the mask in the softmax of `absorb` as the authors have it."""
    golden, terms = Part("d3pm", f"{case}."), Part("d3pm", f"{case}.step{size}.")
    x, logits = golden["x0"], golden["logits"].double()
    vocab, rates = logits.shape[-1], steps.RATES["cosine" if "cosine" in case else "standard"](8)
    target = (
        F.one_hot(torch.tensor(10), 11).double() if case == "absorb" else torch.full((11,), 1 / 11, dtype=torch.float64)
    )
    kept = steps.kept_after(rates)
    clean = F.one_hot(x, vocab).double()
    close(steps.blend(clean.expand(9, -1, -1), kept[:, None].expand(9, 6), target), golden["q_xt_given_x0"])

    t, z = terms["t"], terms["x_next"]
    ratio = torch.stack([(1 - rates[i : i + size]).prod() for i in t.tolist()])[:, None].expand_as(z)
    before = kept[t][:, None].expand_as(z)
    log_p = logits[t + size].log_softmax(-1)
    q = steps.posterior(z, clean.expand(len(t), -1, -1), ratio, before, target)
    p = steps.posterior(z, log_p.exp(), ratio, before, target)
    close(q, terms["posterior_q"])
    close(p, terms["reverse_p"])
    at_x = x.expand_as(z)[..., None]
    kl, cross_entropy = steps.divergence(q, p), -(p.gather(-1, at_x)[..., 0] + 1e-20).log()
    close(kl, terms["kl"])
    close(cross_entropy, terms["cross_entropy"])
    base = torch.where(t[:, None] == 0, cross_entropy, kl)
    close(base, terms["base_loss"])
    close(-0.01 * log_p.gather(-1, at_x)[..., 0], terms["hybrid_0.01"])
    prior = steps.divergence(steps.blend(clean, kept[-1].expand(6), target), target)
    torch.testing.assert_close(prior, golden["prior_kl"])
    close(base.sum() + prior.sum(), terms["elbo"])
    if case != "absorb":  # what the system computes, without the distributions
        flat = [v.flatten() for v in (x.expand_as(z), z, ratio, before)]
        found = steps.uniform_step_nats(Uniform(vocab), logits[t + size].flatten(0, 1), *flat)
        close(found.view_as(z), terms["base_loss"])


def test_sedd() -> None:
    sedd_schedules()
    for noise in ("absorb", "uniform"):
        sedd(noise)
    assert FILES["sedd"].read == FILES["sedd"].keys()


def sedd_schedules() -> None:
    golden = Part("sedd", "schedule.")
    for name, schedule in {
        "loglinear": score_entropy.LogLinearNoise(),
        "geometric": score_entropy.GeometricNoise(),
    }.items():
        close(schedule.sigma(golden["t"]), golden[f"{name}_sigma"])
        close(schedule.dsigma(golden["t"]), golden[f"{name}_dsigma"])


def sedd(noise: str) -> None:
    golden = Part("sedd", f"{noise}.")
    logits, x, z, t = (golden[key] for key in ("logits", "x0", "xt", "t"))
    schedule = LogLinearNoise() if noise == "absorb" else GeometricNoise()
    sigma, dsigma = schedule.sigma(t), schedule.dsigma(t)
    close(sigma, golden["sigma"])
    close(dsigma, golden["dsigma"])
    vocab = logits.shape[-1]
    each = sigma[:, None].expand_as(z)
    if noise == "absorb":
        target = F.one_hot(torch.tensor(12), vocab).double()
        log_score = score_entropy.absorb_log_score(logits, z, each, 12)
        masked = z == 12
        entropy = torch.zeros_like(each)
        entropy[masked] = score_entropy.absorb_entropy(logits[masked], x[masked], 12) / each[masked].expm1()
    else:
        target = torch.full((vocab,), 1 / vocab, dtype=torch.float64)
        log_score = score_entropy.uniform_log_score(logits, z)
        flat = [v.flatten() for v in (x, z, each)]
        entropy = score_entropy.uniform_entropy(Uniform(vocab), logits.flatten(0, 1), *flat).view_as(each)
    close(log_score, golden["log_score"])
    close(entropy, golden["score_entropy"])
    close((dsigma[:, None] * entropy).sum(1), golden["loss_per_example"])
    score, size = log_score.exp(), golden["step_size"]
    close(score_entropy.euler_weights(score, z, (size * dsigma)[:, None].expand_as(z), target), golden["euler_probs"])
    step = (sigma - schedule.sigma(t - size))[:, None].expand_as(z)
    close(score_entropy.analytic_weights(score, z, step, target), golden["analytic_probs"])
    last = score_entropy.analytic_weights(score, z, each, target)
    close(last[..., :12] if noise == "absorb" else last, golden["denoiser_probs"])


def test_diffusionbert() -> None:
    """The authors' sum, its sampling step, and the schedule from counts to probabilities."""
    golden = FILES["diffusionbert"]
    x, real, logits = golden["x0"], golden["target_mask"].double(), golden["logits"].double()
    num_steps, vocab, lam = 16, 11, 0.3
    frequency = spindle.frequency(golden["token_count"])
    frequency[0] = 0  # padding
    close(frequency, golden["word_freq"])
    mean = (frequency[x] * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    c = frequency[x] - mean
    close(c * real, golden["word_freq_logits"] * golden["target_mask"])
    c = golden["word_freq_logits"].double()  # of padding too
    every = torch.arange(num_steps + 1)
    close(1 - every / num_steps, golden["state"])
    close(lam * torch.sin(torch.pi * every / num_steps), golden["lambda_t"])
    kept = spindle.spindle_kept(every[:, None, None], num_steps, lam, c)
    close(kept, golden["keep_probability"])

    terms = Part("diffusionbert", "step1.")
    t, z = terms["t"], terms["x_next"]
    target = F.one_hot(torch.tensor(10), vocab).double()
    clean, log_p = F.one_hot(x, vocab).double().expand(len(t), -1, -1, -1), logits[t + 1].log_softmax(-1)
    ratio = (1 - steps.standard_rates(num_steps)[t])[:, None, None].expand(z.shape)
    q = steps.posterior(z, clean, ratio, kept[t], target)
    p = steps.posterior(z, log_p.exp(), ratio, kept[t], target)
    close(q, terms["posterior_q"])
    close(p, terms["reverse_p"])
    at_x = x.expand_as(z)[..., None]
    kl, cross_entropy = steps.divergence(q, p), -(p.gather(-1, at_x)[..., 0] + 1e-20).log()
    close(kl, terms["kl"])
    close(cross_entropy, terms["cross_entropy"])
    base = torch.where(t[:, None, None] == 0, cross_entropy, kl)
    close(base, terms["base_loss"])
    nats = -log_p.gather(-1, at_x)[..., 0]
    close(0.01 * nats, terms["hybrid_0.01"])
    close((base * real).sum(), terms["likelihood"])
    prior = (steps.divergence(steps.blend(clean[0], kept[-1], target), target) * real).sum()
    close(prior, golden["prior_kl"])

    guess = frequency[logits[t + 1].argmax(-1)]
    guess = spindle.spindle_kept(t[:, None, None], num_steps, lam, guess - guess.mean(-1, keepdim=True))
    close(steps.posterior(z, log_p.exp(), ratio, guess, target), terms["sampler_probs"])

    # What the system computes: without mass on the mask, the terms above are this weight times the nats.
    without = logits[t + 1].index_fill(-1, torch.tensor(10), -torch.inf).softmax(-1)
    p = steps.posterior(z, without, ratio, kept[t], target)
    expected = torch.where(t[:, None, None] == 0, -p.gather(-1, at_x)[..., 0].log(), steps.divergence(q, p))
    weight = spindle.authors_weight(t[:, None, None], num_steps, kept[t]) * (z == 10)
    torch.testing.assert_close(-weight * without.gather(-1, at_x)[..., 0].log(), expected, rtol=1e-9, atol=1e-9)
    assert golden.read == golden.keys()
