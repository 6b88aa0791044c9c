"""Every system learns a source whose likelihood is known: a Markov chain of five states.

A perfect network reaches the source's own likelihood under each of these bounds (the conditionals of any order are
then exact, so Jensen's inequality is tight). After a few hundred steps each comes within the margin of it, stated per
system in nats per token, and none beats it by more than 3 standard errors of the paired difference, as a loss would
that sees its target or omits a token. The draws are fixed; with others a perfect network would fail in 0.14 % of
the cases.

Shapes: B batch, L length, K states.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from esolm import systems
from esolm.core.batch import Batch
from esolm.core.randomness import Randomness
from esolm.core.terms import total
from esolm.net.denoiser import Denoiser, DenoiserConfig
from support import toy

K, L, MASK = 5, 16, 5
BATCH, STEPS, RATE = 64, 320, 2e-3
FRESH, DRAWS = 512, 8
MORE = 24
"""Draws under uniform noise, whose bound varies more."""

COUNTS = "2520 1201 1192 1445 1834 0"
"""Of 8192 tokens of the source, for systems that need to know what is frequent."""
EMBEDDINGS = {"latent_width": 4, "num_steps": 200, "variance": "word"}
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ar": ("ar", {}, 0.005),
    "mdlm": ("mdlm", {}, 0.06),
    "bd3lm": ("bd3lm", {"block_size": 4}, 0.05),
    "esolm-B": ("esolm", {"alpha_0": 0.5}, 0.04),
    "esolm-A": ("esolm", {"alpha_0": 0.5, "variant": "A"}, 0.04),
    "esolm-any-order": ("esolm", {"alpha_0": 0.5, "loss": "any_order"}, 0.04),
    "d3pm-absorb": ("d3pm", {}, 0.1),
    "d3pm-uniform": ("d3pm", {"noise": "uniform", "schedule": "cosine"}, 0.2),
    "sedd-absorb": ("sedd", {}, 0.1),
    "sedd-uniform": ("sedd", {"noise": "uniform"}, 0.2),
    "diffusionbert": ("diffusionbert", {"token_counts": COUNTS}, 0.1),
    "diffusion_lm": ("diffusion_lm", {**EMBEDDINGS, "loss": "bound"}, 0.35),
    "diffusion_lm-authors": ("diffusion_lm", EMBEDDINGS, 1.6),
    "udlm": ("udlm", {}, 0.06),
    "duo": ("duo", {"curriculum_end": 100, "tau_start": 0.05, "tau_end": 0.01}, 0.06),
}
"""Name, options, and the margin in nats per token."""
CASES |= {name: (name, {}, 0.1) for name in systems.names() if name not in {found for found, _, _ in CASES.values()}}


class Chain:
    """x^1 uniform, then x^l from row x^(l-1) of a table of 1.15 nats (uniform: 1.61)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = (1.8 * torch.randn(K, K, generator=generator)).softmax(-1)

    def draw(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = [torch.randint(K, (count,), generator=generator)]
        for _ in range(L - 1):
            x.append(torch.multinomial(self.table[x[-1]], 1, generator=generator)[:, 0])
        return torch.stack(x, 1)

    def nats(self, x: Tensor) -> Tensor:
        """The source's own -log p(x), [B]."""
        return math.log(K) - self.table[x[:, :-1], x[:, 1:]].log().sum(1)


def fit(system: Any, chain: Chain) -> Denoiser:
    """AdamW with warm-up and a linear decay, on new sequences each step."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 64, "heads": 4, "cond_width": 64, "dropout": 0.0, "mlp_ratio": 2}
    net = Denoiser(DenoiserConfig(K + 1, L, latent_width=system.latent_width, **sizes))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    data = chain.draw(BATCH * STEPS, seed=1).split(BATCH)
    everything = torch.ones(BATCH, L, dtype=torch.bool)
    for step, x in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 40, 1.5 * (1 - step / STEPS), 1.0)
        rng = Randomness(0, 0, BATCH).at(step)
        loss = total(system.at_step(step).terms(net, Batch(x), rng, True), system.counts(everything, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net.eval()


@torch.no_grad()
def bound(system: Any, net: Denoiser, x: Tensor) -> Tensor:
    """The system's bound of each sequence, the mean of several draws: [B]."""
    runs = []
    for draw in range(DRAWS if system.masks else MORE):
        terms = system.terms(net, Batch(x), Randomness(9, 0, len(x)).at(draw), False)
        runs.append(sum(term.nats.double().sum(1) for term in terms))
    return torch.stack(runs).mean(0)


SHORT = ("esolm-B",)
"""The others run in `make test-full`: each takes a third of a minute."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.slow) for n in CASES])
def test_comes_close_to_the_source_and_does_not_beat_it(name: str) -> None:
    found, options, margin = CASES[name]
    system, chain = toy.make(found, MASK, **options), Chain()
    net = fit(system, chain)
    x = chain.draw(FRESH, seed=2)
    difference = (bound(system, net, x) - chain.nats(x)) / L
    mean, error = difference.mean().item(), difference.std().item() / math.sqrt(FRESH)
    print(f"{name}: {mean:+.4f} +- {error:.4f} nats per token over {chain.nats(x).mean().item() / L:.4f}")
    assert mean < margin
    assert mean > -3 * error
    assert error < margin / 4  # otherwise both assertions are too weak


def test_the_source_is_neither_trivial_nor_noise() -> None:
    chain = Chain()
    x = chain.draw(FRESH, seed=2)
    per_token = chain.nats(x).mean().item() / L
    assert 1.1 < per_token < 1.2
    counts = torch.bincount(x.flatten(), minlength=K) / x.numel()
    unigram = -(counts * counts.log()).sum().item()
    assert unigram - per_token > 0.3  # far more than any margin
