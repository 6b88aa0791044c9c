"""`Samples`: what `sample` and `infill` return."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from ..data import Tokenizer
from ..sampling.events import Speculation


@dataclass(frozen=True, repr=False)
class Samples:
    """Generated texts with their tokens and their cost."""

    texts: list[str]
    tokens: list[list[int]]
    nfe: list[int]  # network evaluations that each row needed
    passes: int  # network calls of all batches
    steps: list[list[list[int]]]  # the schedule of each row: the positions of each step
    seconds: float
    speculation: Speculation | None = None  # of sampler speculative
    fed: list[list[int]] | None = None  # of samplers confidence and threshold: positions fed at each step of each row
    log_q: list[float] | None = None  # with a pattern: log-probability of all draws of a row; NaN where it is unknown
    diffusion: list[int] | None = None  # the number of steps in each row's diffusion phase; None: all of them
    tokenizer: InitVar[Tokenizer | None] = None  # for the picture of a notebook; no field, so that `asdict` is JSON

    def __post_init__(self, tokenizer: Tokenizer | None) -> None:
        object.__setattr__(self, "_tokenizer", tokenizer)

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        first = repr(self.texts[0] if len(self.texts[0]) <= 60 else f"{self.texts[0][:60]}…") if self.texts else ""
        more = f", and {len(self) - 1} more" if len(self) > 1 else ""
        return f"Samples({first}{more}; {self.passes} passes, {self.seconds:.2f} s)"

    def _repr_html_(self) -> str:
        """For notebooks: the first sample appears step by step; the texts of the others follow."""
        from ..viz import html
        from ..viz.frames import Film

        film, label = None, "step"
        words: Tokenizer | None = vars(self)["_tokenizer"]
        if words is not None and self.tokens and self.steps:
            film = Film.replay(self.tokens[0], self.steps[0], self.diffusion[0] if self.diffusion else None)
            label = "NFE" if self.nfe and self.nfe[0] == len(self.steps[0]) else "step"
        image = None if film is None or words is None else html.animation(film, words, label)
        number = f"{len(self)} sample{'' if len(self) == 1 else 's'}"
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'}"
        return html.samples(f"{number} · {passes} · {self.seconds:.2f} s", image, self.texts)
