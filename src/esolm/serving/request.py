"""The state of one request: a sampling loop of its own, which stops at every network call.

Shapes: R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..constraints.guide import PatternSpan
from ..core.draw import BadLogits
from ..core.order import Chain
from ..model import LanguageModel, Row
from ..net.protocol import Network
from ..sampling.events import until
from ..sampling.options import SamplingOptions
from ..sampling.passes import Pass
from ..sampling.request import Step

WAITING, RUNNING, DONE, FAILED, CANCELLED = "waiting", "running", "done", "failed", "cancelled"


class Chosen(NamedTuple):
    """A token that a pass committed, or changed, in a chain."""

    position: int
    token: int
    logprob: float | None = None  # in the model's own distribution, before temperature and top_p; if requested. None in
    # a chain, where a token has no single distribution that it was drawn from.
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens there with theirs
    step: int = 0  # of the sampling loop


class Generation:
    """One sample while it is served. Its tokens are those of `lm.sample` with the same options.

    index, total: it is sample `index` of `total`. top_logprobs: report the log-probabilities of the tokens, and of as
    many others; None reports none. listen: called with this object and the new tokens after each step, and without
    tokens when it has ended, on the thread of the engine. seconds: a time limit from now on. spans: what must match a
    pattern, by default as `lm.sample` has it.
    """

    def __init__(
        self,
        lm: LanguageModel,
        row: Row,
        options: SamplingOptions,
        index: int = 0,
        total: int = 1,
        *,
        top_logprobs: int | None = None,
        listen: Callable[[Generation, Sequence[Chosen]], object] | None = None,
        seconds: float | None = None,
        spans: Sequence[PatternSpan] | None = None,
    ) -> None:
        lm.check_rows([row])
        self.lm, self.options, self.top_logprobs, self.listen = lm, options, top_logprobs, listen
        self.request, self.schedule, self.rng = lm.planned(
            [row], len(row), options, index, total, None if spans is None else [spans]
        )
        self.state: str = WAITING
        self.error: str | None = None
        self.tokens: list[int | None] = list(row)
        self.drawn = {i for i, token in enumerate(row) if token is None}
        self.rewrites = self.schedule.rewrites
        self.chosen: dict[int, Chosen] = {}
        phase, diffusion = self.schedule.step_of()[0].tolist(), int(self.schedule.diffusion[0])
        self.diffused = {p for p, step in enumerate(phase) if 0 <= step < diffusion}
        self.final = 0  # leading tokens that are decided
        self.passes = self.steps = 0
        self.arrived = time.monotonic()
        self.deadline = None if seconds is None else self.arrived + seconds
        self._steps: Generator[Step | Pass, Tensor, None] | None = None
        self._logits: Tensor | None = None
        self._settle()

    @property
    def ended(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in (DONE, FAILED, CANCELLED)

    @property
    def length(self) -> int:
        """Number of tokens, given or drawn."""
        return len(self.tokens)

    def start(self, net: Network) -> Pass | None:
        """Begin to sample with a deferred network; returns the first pass."""
        self.state = RUNNING
        try:
            found = self.lm.system.sample(net, self.request, self.schedule, self.rng)
        except Exception as error:
            self._fail(error)
            return None
        if not isinstance(found, Generator):
            self.end(FAILED, f"{self.lm.system.name} does not sample by a generator, which serving needs")
            return None
        self._steps = found
        return self.resume(None)

    def resume(self, logits: Tensor | None, tokens: Tensor | BadLogits | None = None) -> Pass | None:
        """Go on with the logits of the last pass, and the tokens drawn from them if the pass asked for tokens, or why
        none could be; returns the next pass, or None at the end."""
        assert self._steps is not None, "resume before start"
        self._logits, self.passes = logits, self.passes + (logits is not None)
        try:
            if isinstance(tokens, BadLogits):
                raise tokens
            answer = logits if tokens is None else tokens
            item = next(self._steps) if answer is None else self._steps.send(answer)
            while not isinstance(item, Pass):
                self._take(item)
                if self.ended:
                    return None
                item = next(self._steps)
            return item
        except StopIteration:
            self._finish()
        except Exception as error:  # whatever a loop raises ends its own request and no other
            self._fail(error)
        return None

    def _finish(self) -> None:
        try:
            if self.request.limits is not None:
                self.request.limits.check(self.lm.system.name)
        except ValueError as error:
            self._fail(error)
        else:
            self.end(DONE)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ValueError | RuntimeError):
            logging.getLogger("esolm").error("a sampling loop failed", exc_info=error)
        where = f"sampling failed at step {self.steps}: " if isinstance(error, BadLogits) else ""
        self.end(FAILED, f"{where}{error}" if str(error) else type(error).__name__)

    def end(self, state: str, error: str | None = None) -> None:
        """End it, once; the engine then frees its row."""
        if self.ended:
            return
        self.state, self.error = state, error
        self._settle()
        if self._steps is not None:
            self._steps.close()
        self._steps = self._logits = None
        self._tell(())

    def _take(self, step: Step) -> None:
        columns = zip(step.position[0].tolist(), step.token[0].tolist(), step.drawn[0].tolist(), strict=True)
        found = [
            Chosen(at, token, step=self.steps) for at, token, drawn in columns if drawn and self.tokens[at] != token
        ]
        if self.top_logprobs is not None and not isinstance(self.schedule, Chain):
            found = self._with_logprobs(found, self.top_logprobs, step)
        for each in found:
            self.tokens[each.position] = each.token
            self.chosen[each.position] = each
        self.steps += 1
        self._settle()
        if found:
            self._tell(found)

    def _tell(self, new: Sequence[Chosen]) -> None:
        """Call the listener; one that fails, as when its event loop is closed, ends its own request."""
        if self.listen is None:
            return
        try:
            self.listen(self, new)
        except Exception:
            self.listen = None
            logging.getLogger("esolm").exception("the listener of a request failed")
            self.end(CANCELLED)

    def _with_logprobs(self, found: list[Chosen], most: int, step: Step) -> list[Chosen]:
        """The first rows of a pass's logits are those of the tokens that it commits, in their order: in every loop that
        does not choose among its candidates."""
        if self._logits is None:
            return found
        rows = torch.arange(len(found)) if step.candidates is None else step.candidates.column[0, : len(found)]
        logits = self._logits.flatten(0, -2)[rows.to(self._logits.device)].float()
        logits[:, self.lm.system.mask_id] = float("-inf")
        log_p = logits.log_softmax(-1)
        values, ids = (t.tolist() for t in log_p.topk(min(most, log_p.shape[1] - 1)))
        own = log_p[torch.arange(len(found)), torch.tensor([each.token for each in found])].tolist()
        return [
            each._replace(logprob=own[i], top=tuple(zip(ids[i], values[i], strict=True)))
            for i, each in enumerate(found)
        ]

    def _settle(self) -> None:
        """Count the leading tokens that are final; while a chain runs, none that it draws is."""
        if self.rewrites and self.state != DONE:
            return
        while self.final < len(self.tokens) and self.tokens[self.final] is not None:
            self.final += 1

    def leading(self, first: int = 0) -> tuple[list[int], bool]:
        """The decided tokens from `first` on, up to a generated end-of-sequence token, and whether there is one."""
        ids = [token for token in self.tokens[first : self.final] if token is not None]
        kept = until(ids, self.lm.tokenizer.eos_id, {i - first for i in self.drawn})
        return kept, len(kept) < len(ids)

    def text(self, cut: bool = True) -> str:
        """The text as `lm.sample` returns it, or without `cut` as `lm.infill` does."""
        ids = [self.lm.system.mask_id if token is None else token for token in self.tokens]
        kept = until(ids, self.lm.tokenizer.eos_id, self.drawn) if cut else ids
        return self.lm.tokenizer.decode(kept)
