"""What the API makes of a generation: the text that is final, where it ends, and OpenAI's and our JSON of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data import Tokenizer
from ..generation.collect import before_stop
from ..model import Row
from .request import Chosen, Generation

UNFINISHED = "\ufffd"
"""How the bytes of a character are decoded before all of them are there."""


class Choice:
    """One completion: the tokens start .. start + count of a generation, up to an end-of-sequence token or a stop.

    The text grows from the left as tokens become final; `take` returns what is new of it.
    """

    def __init__(self, index: int, start: int, count: int, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self.index, self.start, self.count, self.stops, self.tokenizer = index, start, count, stops, tokenizer
        self.generation: Generation | None = None
        self.reason: str | None = None
        self.ids: list[int] = []
        self._text: str | None = ""  # None: that of the ids, decoded when it is asked for
        self._taken = self._tokens_taken = 0

    @property
    def before(self) -> int | None:
        """The token before the completion."""
        return self.generation.tokens[self.start - 1] if self.generation is not None and self.start else None

    @property
    def text(self) -> str:
        """The final text so far."""
        if self._text is None:
            self._text = self._decoded(self.ids)
        return self._text

    def _decoded(self, ids: list[int]) -> str:
        before = self.before
        return self.tokenizer.decode(ids) if before is None else self.tokenizer.decode_after(ids, before)

    def ended(self) -> bool:
        """Read the final tokens; whether the text has ended. Called on the thread of the engine, and only there."""
        self.update()
        return self.reason is not None

    def update(self) -> None:
        """Read the final tokens."""
        generation = self.generation
        if generation is None or self.reason is not None:
            return
        ids, ended = generation.leading(self.start)
        if len(ids) >= self.count:
            ids, ended = ids[: self.count], False
        if len(ids) == len(self.ids) and not ended and len(ids) < self.count:
            return
        reason, text = "stop" if ended else "length" if len(ids) == self.count else None, None
        if self.stops:
            text = self._decoded(ids)
            if len(short := before_stop(text, self.stops)) < len(text):
                text, reason = short, "stop"
        self.ids, self._text, self.reason = ids, text, reason

    def take(self) -> str:
        """The part of the text that is certain and was not taken before."""
        text, end = self.text, len(self.text)
        if self.reason is None:
            end = len(text.rstrip(UNFINISHED))
            held = (k for stop in self.stops for k in range(len(stop) - 1, 0, -1) if text.endswith(stop[:k]))
            end = min(end, len(text) - max(held, default=0))
        new = text[self._taken : end]
        self._taken = max(self._taken, end)
        return new

    def logprobs(self, offset: int, rest: bool = False) -> dict[str, Any]:
        """OpenAI's lists for the completion, or with `rest` only for what was not reported before."""
        assert self.generation is not None
        first = self._tokens_taken if rest else 0
        ids, at = self.ids, [self.generation.chosen.get(self.start + i) for i in range(len(self.ids))]
        names = pieces(self.tokenizer, ids, self.before)
        offsets = [offset + sum(map(len, names[:i])) for i in range(len(ids))]
        self._tokens_taken = len(ids)
        return {
            "tokens": names[first:],
            "token_logprobs": [each.logprob if each else None for each in at[first:]],
            "top_logprobs": [
                {piece(self.tokenizer, token): value for token, value in each.top} if each and each.top else None
                for each in at[first:]
            ],
            "text_offset": offsets[first:],
        }


def piece(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token inside a text: after itself, because some decoders drop the first space of a text."""
    return tokenizer.decode_after([token], token)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], before: int | None = None) -> list[str]:
    """The text of each token after the token `before`; a character of several tokens belongs to the last of them."""
    found, waiting = list[str](), list[int]()
    for i, token in enumerate(ids):
        waiting.append(token)
        last = before if len(waiting) > i else ids[i - len(waiting)]
        text = tokenizer.decode(waiting) if last is None else tokenizer.decode_after(waiting, last)
        whole = not text.endswith(UNFINISHED) or len(waiting) >= 4 or i + 1 == len(ids)
        found.append(text if whole else "")
        if whole:
            waiting = []
    return found


def step_event(index: int, generation: Generation, new: Sequence[Chosen]) -> dict[str, Any]:
    """A typed event: the tokens that one step committed."""
    tokenizer = generation.lm.tokenizer
    return {
        "object": "step",
        "index": index,
        "step": new[0].step,
        "positions": [each.position for each in new],
        "tokens": [each.token for each in new],
        "pieces": [piece(tokenizer, each.token) for each in new],
        "logprobs": [each.logprob for each in new],
        "phases": ["diffusion" if each.position in generation.diffused else "sequential" for each in new],
    }


def infilled(index: int, generation: Generation) -> dict[str, Any]:
    """The JSON of one infilled text."""
    ids = [token for token in generation.tokens if token is not None]
    at = [generation.chosen.get(i) for i in range(len(ids))]
    return {
        "index": index,
        "text": generation.text(cut=False),
        "tokens": ids,
        "pieces": pieces(generation.lm.tokenizer, ids),
        "drawn": sorted(generation.drawn),
        "logprobs": [each.logprob if each else None for each in at],
        "top_logprobs": [[[*pair] for pair in each.top] if each else [] for each in at],
        "top_pieces": [[piece(generation.lm.tokenizer, token) for token, _ in each.top] if each else [] for each in at],
        "passes": generation.passes,
        "finish_reason": "stop",
    }


def completion_rows(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]], suffix: str | None, most: int, block: int
) -> list[tuple[Row, int, int]]:
    """For each prompt its row, where the completion starts, and its number of tokens.

    A system that samples by blocks needs a multiple of its block: the row is longer after a prompt, and between prompt
    and suffix the completion is shorter. Raises ValueError.
    """
    after, found = tokenizer.encode_after(suffix) if suffix else [], list[tuple[Row, int, int]]()
    for prompt in prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        count, length = most, len(ids) + most + len(after)
        if after:
            count -= length % block
            if count < 1:
                raise ValueError(
                    f"max_tokens is {most}; prompt and suffix leave no multiple of {block} tokens: raise it"
                )
        room = count + (0 if after else -length % block)
        found.append(([*ids, *[None] * room, *after], len(ids), count))
    return found
