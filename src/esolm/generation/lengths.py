"""Lengths of blanks, chosen by the likelihood of the text around them.

With sizes n the given tokens stand at the positions that n gives them, and log p(given | n) is the sum of their
conditionals in ascending order, each given the ones before it; what will stand in the blanks plays no part. Sizes are
drawn from p(n | given), proportional to prior(n) p(given | n), or the likeliest are taken.

If there are at most MOST combinations of sizes, all are compared. With more, blanks take turns: each one's size is
drawn, or maximised, given those of the others, SWEEPS times.

Shapes: C combinations, B batch, L length.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..constraints.guide import Guide, NoMatch, PatternSpan
from ..constraints.walk import shortest
from ..core.batch import Batch
from ..core.draw import inverse_cdf
from ..core.randomness import fold, uniform
from ..data import Tokenizer
from ..likelihood.orders import padded
from ..net.protocol import Network
from ..sampling.options import SamplingOptions
from ..systems import System, as_any_order
from .limits import spans_of
from .rows import Blanked, Row, Size

MOST = 256
"""Combinations of sizes that are all compared."""
SWEEPS = 2
CHOICES = ("draw", "best")

DEFAULT = SamplingOptions()
Sizes = tuple[int, ...]
Prior = Sequence[float] | Mapping[int, float]
"""The weight of each size: in the order of the range, or by size."""


@dataclass(frozen=True, repr=False)
class BlankLengths:
    """The sizes that the blanks of a text may have, and how likely they are."""

    sizes: list[Sizes]  # of the blanks in turn
    log_likelihood: Tensor  # float64 [C]: log p(given | sizes), in nats
    log_weights: Tensor  # float64 [C]: with the prior added; -inf where no text matches

    @property
    def probabilities(self) -> Tensor:
        """p(sizes | given), float64 [C]."""
        return self.log_weights.softmax(0)

    @property
    def best(self) -> Sizes:
        """The likeliest sizes."""
        return self.sizes[int(self.log_weights.argmax())]

    def __repr__(self) -> str:
        return f"BlankLengths({len(self.sizes)} combinations; best {self.best}, {float(self.probabilities.max()):.0%})"


def log_prior(prior: Prior | None, sizes: Sequence[int]) -> dict[int, float]:
    """log of the normalised weight of each size of a blank; None is uniform. Raises ValueError."""
    if prior is None:
        return {n: -math.log(len(sizes)) for n in sizes}
    if isinstance(prior, Mapping):
        weights = [float(prior.get(n, 0.0)) for n in sizes]
    elif len(prior) == len(sizes):
        weights = [float(weight) for weight in prior]
    else:
        raise ValueError(f"length_prior has {len(prior)} weights for the {len(sizes)} lengths of a blank")
    total = sum(weights)
    if not all(0 <= weight < math.inf for weight in weights) or not 0 < total < math.inf:
        raise ValueError(f"length_prior gives {weights}; it must give weights of at least 0, and some above it")
    return {n: math.log(weight / total) if weight else -math.inf for n, weight in zip(sizes, weights, strict=True)}


def log_likelihood(net: Network, system: System, text: Blanked, some: Sequence[Sizes], batch_size: int) -> list[float]:
    """log p(given | sizes) of each combination, in passes of `batch_size` rows."""
    if not system.any_order:
        raise ValueError(f"{system.name} has no likelihood under an order: give tokens_per_blank a number, not a range")
    any_order, found = as_any_order(system), list[float]()
    for first in range(0, len(some), batch_size):
        part = [text.row(sizes) for sizes in some[first : first + batch_size]]
        x, valid = padded([[0 if token is None else token for token in row] for row in part])
        given, _ = padded([[token is not None for token in row] for row in part])
        group = torch.where(given.bool(), 0, torch.where(valid, 1, 2))  # blanks behind the given tokens, then padding
        sigma = group.argsort(dim=1, stable=True)
        batch = Batch(x, None if bool(valid.all()) else valid).to(net.device)
        with torch.no_grad():
            nats = any_order.order_nats(net, batch, sigma.to(net.device)).cpu().double()
        found += (-(nats * given).sum(1)).tolist()
    if not all(map(math.isfinite, found)):
        raise ValueError("a likelihood is not finite: the weights are damaged")
    return found


class Lengths:
    """Chooses the sizes of the blanks of one text."""

    def __init__(
        self,
        net: Network,
        system: System,
        text: Blanked,
        candidates: Sequence[Sequence[int]],
        spans: Callable[[Sequence[int]], list[PatternSpan]],
        prior: Prior | None = None,
        options: SamplingOptions = DEFAULT,
    ) -> None:
        """spans: what must match a pattern, with these sizes."""
        self.score = lambda some: log_likelihood(net, system, text, some, options.batch_size)
        self.text, self.candidates, self.spans = text, candidates, spans
        self.open, self.seed = any(len(sizes) > 1 for sizes in candidates), options.seed
        if prior is not None and not self.open:
            raise ValueError("length_prior belongs to a range: give tokens_per_blank a range such as 1-12")
        self.prior = [log_prior(prior, sizes) if len(sizes) > 1 else {sizes[0]: 0.0} for sizes in candidates]
        self._why: NoMatch | None = None
        self._known: dict[Sizes, tuple[float, float]] = {}

    @functools.cached_property
    def all(self) -> BlankLengths | None:
        """All combinations of sizes, or None if there are too many."""
        if math.prod(map(len, self.candidates)) > MOST:
            return None
        return self.compare([*itertools.product(*self.candidates)])

    @property
    def compared(self) -> BlankLengths:
        """All combinations of sizes. Raises ValueError if there are too many."""
        if self.all is None:
            raise ValueError(f"the blanks have more than {MOST} combinations of lengths: give shorter ranges")
        return self.all

    def possible(self, sizes: Sizes) -> bool:
        """Whether some text of these sizes matches the patterns."""
        try:
            Guide([self.spans(sizes)], [self.text.row(sizes)])
        except NoMatch as error:
            self._why = error
            return False
        return True

    def compare(self, some: Sequence[Sizes]) -> BlankLengths:
        """Weigh combinations of sizes against each other; each is scored once."""
        new = [sizes for sizes in some if sizes not in self._known]
        prior = {n: sum(table[k] for table, k in zip(self.prior, n, strict=True)) for n in new}
        alive = [n for n in new if prior[n] > -math.inf and self.possible(n)]
        self._known |= dict.fromkeys(new, (-math.inf, -math.inf))
        self._known |= {n: (score, score + prior[n]) for n, score in zip(alive, self.score(alive), strict=True)}
        values = torch.tensor([self._known[sizes] for sizes in some], dtype=torch.float64)
        return BlankLengths(list(some), values[:, 0], values[:, 1])

    def sizes(self, choice: str, seed: int, sample: int) -> Sizes:
        """The sizes of one sample. Raises ValueError if no combination is possible."""
        if not self.open:
            return tuple(sizes[0] for sizes in self.candidates)
        if self.all is not None:
            return self._pick(self.all, choice, seed, sample, 0)
        now = self.first()
        for turn, blank in itertools.product(range(SWEEPS), range(len(now))):
            some = [(*now[:blank], n, *now[blank + 1 :]) for n in self.candidates[blank]]
            now = list(self._pick(self.compare(some), choice, seed, sample, 1 + turn * len(now) + blank))
        return tuple(now)

    def first(self) -> list[int]:
        """The least sizes, from left to right, that are possible; looks at no combinations. Raises ValueError."""
        allowed = [[n for n in table if table[n] > -math.inf] for table in self.prior]
        now = [sizes[0] for sizes in allowed]
        places, row = self.text.spans(now), self.text.row(now)
        for span in self.spans(now):
            inside = [i for i, (start, stop) in enumerate(places) if span.start <= start and stop <= span.stop]
            parts: list[int | Sequence[int]] = []
            for at, token in enumerate(row[span.start : span.stop], span.start):
                if token is not None:
                    parts.append(int(span.steps.automaton.class_of[token]))
                parts += [allowed[i] for i in inside if places[i][0] == at]
            accepting = span.steps.automaton.accepting(span.pad)
            found = shortest(span.steps, span.first_state, accepting, parts)
            if found is None:
                self.possible(tuple(sizes[-1] for sizes in allowed))
                raise ValueError(str(self._why))
            for i, n in zip(inside, found, strict=True):
                now[i] = n
        return now

    def rows(self, choice: str, samples: range) -> tuple[list[Row], list[list[PatternSpan]]]:
        """The row of each sample, and its spans that must match a pattern."""
        if choice not in CHOICES:
            raise ValueError(f"length_choice is {choice!r}; it must be one of {', '.join(CHOICES)}")
        sizes = [self.sizes(choice, self.seed, i) for i in samples]
        return [self.text.row(n) for n in sizes], [self.spans(n) for n in sizes]

    def _pick(self, found: BlankLengths, choice: str, seed: int, sample: int, draw: int) -> Sizes:
        if not bool((found.log_weights > -math.inf).any()):
            why = "length_prior gives all lengths that are possible no weight" if self._why is None else str(self._why)
            raise ValueError(why)
        if choice == "best":
            return found.best
        u = uniform(fold(seed, "lengths"), torch.tensor([sample]), torch.tensor([draw]))
        return found.sizes[int(inverse_cdf(found.probabilities[None], u))]


def lengths_of(
    net: Network,
    system: System,
    tokenizer: Tokenizer,
    text: str,
    blank: str,
    tokens_per_blank: Size | Sequence[Size],
    options: SamplingOptions,
    prior: Prior | None = None,
) -> Lengths:
    """The lengths of a text with blanks. Raises ValueError."""
    cut = Blanked.of(tokenizer, text, blank)

    def spans(sizes: Sequence[int]) -> list[PatternSpan]:
        return spans_of(tokenizer, cut.row(sizes), options, "none", cut.spans(sizes), cut.leads)

    return Lengths(net, system, cut, cut.candidates(tokens_per_blank), spans, prior, options)
