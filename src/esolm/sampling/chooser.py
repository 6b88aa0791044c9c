"""How tokens are drawn for positions, restricted by a guide if there is one.

Shapes: B batch, m draws of a row, R of all rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..constraints.guide import Guide
from ..core.draw import Draw
from ..core.float64 import to_device
from ..core.randomness import Randomness, fold, uniform
from .passes import Drawing
from .request import Request


@dataclass(frozen=True)
class Chooser:
    """Draws tokens for positions; the uniform draw is a function of seed, row and position alone, and of the step in a
    chain, which draws a position several times."""

    draw: Draw
    rng: Randomness
    mask_id: int
    prepended: int = 0  # tokens before the text; positions of the text do not count them
    guide: Guide | None = None  # restricts the draws

    @classmethod
    def of(cls, request: Request, rng: Randomness, mask_id: int) -> Chooser:
        """The chooser of a request."""
        return cls(request.draw, rng.at("token"), mask_id, guide=request.guide())

    def at(self, step: int) -> Chooser:
        """The chooser of one step of a chain, with draws of its own."""
        return dataclasses.replace(self, rng=self.rng.at(step))

    def __call__(self, logits: Tensor, row: Tensor, position: Tensor) -> Tensor:
        """logits [R, V], row and position int [R] -> tokens int [R]."""
        if self.guide is not None:
            return self.guided(logits, row, position)[0]
        return self.draw(logits, lambda k: self.uniform(k, row, position, logits.device), self.mask_id)

    def drawing(self, row: Tensor, position: Tensor, device: torch.device) -> Drawing | None:
        """How the tokens of these positions are drawn; None with a guide, which draws them one after another."""
        if self.guide is not None:
            return None
        return Drawing(self.draw, lambda k: self.uniform(k, row, position, device), self.mask_id)

    def guided(self, logits: Tensor, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int [R] and what was allowed, bool [R, V]. Those of a row are drawn one after another: each is
        restricted to what can be completed together with the tokens before it."""
        assert self.guide is not None
        free = dataclasses.replace(self, guide=None)
        allowed = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
        tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        row, position = row.cpu(), position.cpu()
        turns = dict[int, list[int]]()
        for i, number in enumerate(row.tolist()):
            turns.setdefault(number, []).append(i)
        for turn in range(max(map(len, turns.values()), default=0)):  # one draw of each row that has as many
            now = torch.tensor([own[turn] for own in turns.values() if turn < len(own)])
            which, at = row[now], position[now]
            fits = self.allowed(which, at, logits.shape[1]).to(logits.device)
            scores = restricted(logits[now.to(logits.device)], fits)
            found = free(scores, which, at)
            self.commit(which, at, found, free.draw.probabilities(scores, self.mask_id))
            allowed[now.to(logits.device)], tokens[now.to(logits.device)] = fits, found
        return tokens, allowed

    def allowed(self, row: Tensor, position: Tensor, vocabulary: int) -> Tensor:
        """The tokens that the guide allows, bool [R, V]."""
        assert self.guide is not None
        return self.guide.allowed(row, position - self.prepended, vocabulary)

    def commit(self, row: Tensor, position: Tensor, token: Tensor, probability: Tensor) -> None:
        """Report drawn tokens, int [R], and the distributions that they have, [R, V], to the guide, if there is one."""
        if self.guide is not None:
            self.guide.commit(row, position.cpu() - self.prepended, token)
            log_q = probability.gather(1, token[:, None])[:, 0].double().log().cpu()
            np.add.at(self.guide.log_q, row.numpy(), log_q.numpy())

    def uniform(self, purpose: int | str, row: Tensor, position: Tensor, device: torch.device) -> Tensor:
        """The uniform draws of positions for one purpose, float64 [R]."""
        row, position = row.cpu() + self.rng.first, position.cpu() - self.prepended
        return to_device(uniform(fold(self.rng.key, purpose), row, position), device)


def restricted(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits of the allowed tokens, and -inf elsewhere; both [R, V]. None allows all."""
    return logits if allowed is None else logits.masked_fill(~allowed.to(logits.device), -torch.inf)
