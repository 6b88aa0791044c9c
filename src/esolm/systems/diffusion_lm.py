"""Diffusion-LM: Gaussian diffusion of the embeddings of tokens (Li et al. 2022).

Shapes: B batch, L length, R scored rows, D width of an embedding, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core import vectors
from ..core.batch import Batch
from ..core.draw import Draw
from ..core.float64 import wide
from ..core.order import Schedule
from ..core.randomness import Randomness, uniform
from ..core.terms import Term, without_id
from ..core.vectors import GaussianSteps, StrictBound, sqrt_steps
from ..core.visibility import full
from ..net.conditionals import place_nats
from ..net.conditioned import embedder
from ..net.denoiser import Rows
from ..net.head import Score, TiedHead, VectorPass, score_rows
from ..net.protocol import Forward, Network
from ..sampling.chain import WHOLE, chain_plan, drawn_positions
from ..sampling.request import Request, Step
from . import System
from ._uniform import BOUNDS

TERMS = ("diffusion", "rounding", "prior")
CHOICES = {"variance": ("small", "word"), "loss": ("authors", "bound"), "bound": BOUNDS}


class Row(NamedTuple):
    """What is known of the scored rows in a pass, [R, D] each but t."""

    t: Tensor  # int [R], on the CPU
    clean: Tensor  # embeddings
    start: Tensor
    noisy: Tensor  # x_t
    predicted: Tensor  # the start, by the network


@dataclass(frozen=True)
class DiffusionLM(System):
    """Embeddings turn into noise in T steps, and the network predicts them; a rounding layer turns them into tokens.

    Given tokens keep their clean embeddings. A model that was trained without any has never seen a clean embedding
    beside noisy ones, so prompts and infilling are outside of what it learned: train on data with given tokens.
    """

    latent_width: int = 128
    """D, the width of the embeddings."""
    num_steps: int = 2000
    """T, steps of the forward process; sampling may take fewer."""
    variance: Literal["small", "word"] = "small"
    """Variance of a reverse step. small: as in the authors' code, which costs 0.04 nats per token and dimension. word:
    that of a step in which the token is known, which costs nothing."""
    loss: Literal["authors", "bound"] = "authors"
    """What training minimises. authors: the squared error, the same for all steps. bound: the strict bound, which gives
    far more weight to steps with little noise."""
    clamp: bool = False
    """Round predictions to the nearest embedding in the bound too, which is then that of the sampler clamped."""
    bound: Literal["strict", "authors"] = "strict"
    """The validation bound. strict: one step for each example, drawn at random, in one pass. authors: the sum of their
    code in T passes, which is a bound too, but a loose one: its last step leads to another start than its first."""
    mask_id: int = -1

    samplers: ClassVar = {"clamped": ("num_steps",), "ancestral": ("num_steps",), "ddim": ("num_steps",)}
    masks = False
    timed = True

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 2")
        if self.latent_width < 1:
            raise ValueError(f"latent_width is {self.latent_width}; it must be at least 1")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.bound == "authors" and self.variance != "small":
            raise ValueError("bound authors is that of variance small: change one of them")

    @property
    def steps(self) -> GaussianSteps:
        """The forward process."""
        return sqrt_steps(self.num_steps)

    def time(self, t: Tensor) -> Tensor:
        """What the network is fed for x_t: 1000 t / T."""
        return 1000 * t.double() / self.num_steps

    def counts(self, scored: Tensor, rng: Randomness) -> dict[str, int]:
        return dict.fromkeys(TERMS, int(scored.sum()))

    def terms(self, net: Forward, batch: Batch, rng: Randomness, train: bool) -> list[Term]:
        """Training has one step for each example. In the authors' loss, the terms diffusion and prior are means over D
        and not nats; the rounding term is that of the bound."""
        size = len(batch.x)
        if train and self.loss == "authors":
            t = self._uniform_steps(rng.at("time").times(rng.examples(size), rng.total))
            return self._pass(net, batch, rng, t, self._loss)
        if train or self.bound == "strict":
            return self._strict(net, batch, rng, independent=False, clamp=self.clamp and not train)
        found = [
            self._pass(net, batch, rng, torch.full((size, 1), t), self._authors, self.clamp, t)
            for t in range(self.num_steps)
        ]
        return [Term(TERMS[0], torch.stack([terms[0].nats for terms in found]).sum(0), batch.scored), *found[0][1:]]

    def bound_over_times(self, net: Forward, batch: Batch, rng: Randomness, independent: bool) -> list[Term]:
        return self._strict(net, batch, rng, independent, self.clamp)

    def _strict(self, net: Forward, batch: Batch, rng: Randomness, independent: bool, clamp: bool) -> list[Term]:
        """The strict bound at one step for each example: steps are drawn in proportion to the root of their weight, or
        independent and uniform."""
        bound, size = StrictBound(self.steps, self.variance), len(batch.x)
        if independent:
            t = self._uniform_steps(rng.at("time").uniform(rng.examples(size), 1))
            chance = torch.full(t.shape, 1 / self.num_steps, dtype=torch.float64)
        else:
            u = rng.at("time").times(rng.examples(size), rng.total)
            t = torch.searchsorted(bound.chance.cumsum(0), u).clamp_max(self.num_steps - 1)
            chance = bound.chance[t]
        weight = (1 / chance).expand(batch.x.shape)[batch.scored.cpu()]

        def nats(row: Row) -> list[Tensor]:
            means = bound.mean_nats(row.t, row.clean, row.noisy, row.predicted)
            spread = bound.spread * row.clean.shape[-1]
            return [weight.to(means) * means + spread, bound.prior_nats(row.clean)]

        return self._pass(net, batch, rng, t, nats, clamp)

    def _uniform_steps(self, u: Tensor) -> Tensor:
        return (u * self.num_steps).long().clamp_max(self.num_steps - 1)

    def _loss(self, row: Row) -> list[Tensor]:
        return vectors.training_terms(self.steps, row.t, row.clean, row.start, row.predicted)

    def _authors(self, row: Row) -> list[Tensor]:
        return vectors.authors_terms(self.steps, row.t, row.clean, row.start, row.predicted)

    def _pass(
        self,
        net: Forward,
        batch: Batch,
        rng: Randomness,
        t: Tensor,
        function: Callable[[Row], list[Tensor]],
        clamp: bool = False,
        draw: int = 0,
    ) -> list[Term]:
        """The terms in one pass at the steps t, int [B, 1]: function gives the diffusion and the prior, [R].

        draw: passes of one batch have the same starts and, if their numbers differ, other noise.
        """
        x, scored, steps = batch.x, batch.scored, self.steps
        length, spread = x.shape[1], steps.start_variance.sqrt().item()
        of_start, noise = (self._normal(x, key, wide(x.device)) for key in (rng.at("start"), rng.at("noise", draw)))
        free, each = scored[..., None], t.expand(x.shape)

        def feed(clean: Tensor) -> Tensor:
            start = clean + spread * of_start.to(clean)
            return torch.where(free, steps.noised(start, each, noise), clean)

        def result(clean: Tensor, predicted: Tensor, head: TiedHead) -> Tensor:
            own = each[scored.cpu()]
            start = clean + spread * of_start[scored].to(clean)
            noisy = steps.noised(start, own, noise[scored])
            if clamp:
                predicted = head.weight[by_rows(nearest, predicted, head, self.mask_id)]
            diffusion, prior = function(Row(own, clean, start, noisy, predicted))
            rounding = score_rows(head, start, Score(x[scored], self.mask_id))
            return torch.stack([diffusion, rounding.to(diffusion), prior], -1)

        position = torch.arange(length, device=x.device)[None]
        out = Rows(slice(0, length), scored.flatten().nonzero()[:, 0])
        time = self.time(t[:, 0]).to(wide(x.device)).to(x.device)
        seen = full(length, batch.valid, x.device)
        found = net(x, position, seen, time=time, out=out, score=VectorPass(feed, result, len(TERMS)))
        placed = (place_nats(nats, scored, position.expand_as(x), length) for nats in found.unbind(-1))
        return [Term(name, nats, scored) for name, nats in zip(TERMS, placed, strict=True)]

    def plan(self, request: Request, rng: Randomness) -> Schedule:
        if request.draw != Draw():
            raise ValueError(
                "temperature, top_p and top_k shape probabilities of tokens, and diffusion_lm draws embeddings: "
                "leave them out"
            )
        return chain_plan(self.name, self.samplers, request, "clamped", most=self.num_steps)

    def sample(self, net: Network, request: Request, schedule: Schedule, rng: Randomness) -> Iterator[Step]:
        """The reverse chain; the tokens of a step are what its embeddings are rounded to, and the last ones count.

        clamped: predictions are rounded to the nearest embedding. ddim: only the first embeddings are drawn.
        """
        sampler, inner, x = request.options.sampler or "clamped", embedder(net), request.x
        at, free = drawn_positions(schedule, x.shape[1])
        index = torch.linspace(self.num_steps - 1, 0, schedule.sizes.shape[1], dtype=torch.float64).round().long()
        steps = self.steps.respaced(index.flip(0))
        deviation = steps.variance(self.variance).sqrt().tolist()
        state = self._normal(x, rng.at("prior"), inner.dtype)
        for k, time in enumerate(self.time(index).tolist()):
            step = len(index) - 1 - k
            predicted = self._predict(net, request, state, time)
            if sampler == "clamped":
                predicted = inner.embed(by_rows(nearest, predicted, inner.head, self.mask_id))
            if sampler == "ddim":
                state = vectors.ddim_step(steps, step, state, predicted)
            else:
                noise = self._normal(x, rng.at("noise", k), inner.dtype) * (deviation[step] if step else 0.0)
                state = vectors.ancestral_step(steps, step, state, predicted, noise)
            token = by_rows(rounded, state, inner.head, self.mask_id)
            yield Step(at, token.gather(1, at.to(x.device)), free, fed=free.any(1))

    def _normal(self, x: Tensor, rng: Randomness, dtype: torch.dtype) -> Tensor:
        """Standard Gaussian numbers, [B, L, D]: a function of the example, the position and the dimension."""
        device = x.device if wide(x.device) == torch.float64 else torch.device("cpu")
        column = torch.arange(x.shape[1] * self.latent_width, device=device)[None]
        u = uniform(rng.key, rng.examples(len(x))[:, None].to(device), column)
        return torch.special.ndtri(u).view(*x.shape, self.latent_width).to(dtype).to(x.device)

    def _predict(self, net: Network, request: Request, state: Tensor, time: float) -> Tensor:
        """The prediction of the start, [B, L, D], from x_t at the positions that are drawn, and the given tokens."""
        x, length = request.x, request.x.shape[1]
        free = ~request.given.to(x.device)[..., None]
        score = VectorPass(
            lambda clean: torch.where(free, state, clean), lambda clean, predicted, head: predicted, self.latent_width
        )
        valid = None if bool(request.valid.all()) else request.valid.to(x.device)
        position = torch.arange(length, device=x.device)[None]
        each = torch.full((len(x),), time, dtype=wide(x.device), device=x.device)
        return net(x, position, full(length, valid, x.device), time=each, score=score).view_as(state)


def nearest(x: Tensor, head: Any, exclude: int) -> Tensor:
    """The tokens whose embeddings are nearest to x [R, D], int [R]."""
    return vectors.nearest(x, head.weight, exclude)


def rounded(x: Tensor, head: Any, exclude: int) -> Tensor:
    """The likeliest tokens of x [R, D], int [R]."""
    return without_id(head(x), exclude).argmax(-1)


def by_rows(function: Callable[..., Tensor], x: Tensor, head: Any, exclude: int) -> Tensor:
    """The tokens of x [..., D] by one of the functions above, in chunks of rows."""
    rows = max(1, WHOLE // head.weight.shape[0])
    return torch.cat([function(some, head, exclude) for some in x.flatten(0, -2).split(rows)]).view(x.shape[:-1])
