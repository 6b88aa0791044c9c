"""Finished samples from the events of a stream, and their importance weights.

Shapes: B batch, L length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.batch import Batch
from ..data import Tokenizer
from ..likelihood.orders import padded
from ..net.protocol import Network
from ..sampling.events import Event, Work, costs, until
from ..systems import System, as_any_order
from .samples import Samples


def collected(tokenizer: Tokenizer, events: Iterator[Event], cut: bool = True, stops: Sequence[str] = ()) -> Samples:
    """Run a stream to its end.

    cut: the text ends at the first end-of-sequence token that was generated, and before the first of `stops`.
    """
    passes, last, seconds, work = 0, dict[int, Event](), 0.0, dict[int, Work]()
    for event in events:
        last[event.first] = event
        passes += event.committed.drawn.shape[1] > 0
        work.setdefault(event.first, Work()).add(event.committed)
        seconds += event.seconds
    texts, tokens, steps, diffusion = [], [], [], list[int]()
    for event, done in zip(last.values(), work.values(), strict=True):
        schedule = event.schedule
        for row, ids in enumerate(event.tokens.tolist()):
            ids = ids[: int(schedule.lengths[row])]
            tokens.append(ids)
            steps.append(schedule.steps(row) if done.steps is None else done.steps[row])
            diffusion.append(len(steps[-1]) if done.steps is not None else int(schedule.diffusion[row]))
            drawn = set(schedule.free(row))
            prompt = tokenizer.decode(ids[: min(drawn, default=len(ids))]) if stops else ""
            text = tokenizer.decode(until(ids, tokenizer.eos_id, drawn) if cut else ids)
            texts.append(before_stop(text, stops, len(prompt)))
    nfe, speculation, fed = costs(list(work.values()))
    limited = [event.log_q for event in last.values() if event.log_q is not None]
    log_q = [value for values in limited for value in values] if len(limited) == len(last) else None
    return Samples(texts, tokens, nfe, passes, steps, seconds, speculation, fed, log_q, diffusion, tokenizer)


def stops_of(stop: str | Sequence[str]) -> list[str]:
    """The texts at which what is generated ends. Raises ValueError if one is empty."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(stops):
        raise ValueError("stop is an empty text: give the text before which a sample ends, or leave it out")
    return stops


def before_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """The text before the first of `stops` at `start` or later; all of it if there is none."""
    found = [at for stop in stops if (at := text.find(stop, start)) >= 0]
    return text[: min(found)] if found else text


def log_weights(net: Network, system: System, samples: Samples, batch_size: int = 32) -> Tensor:
    """log p(x | sigma) - log q(x | sigma) of constrained samples, float64 [n].

    p is the model's exact likelihood of the drawn tokens in the order in which they were drawn, given the others in
    ascending order; q is the probability with which the sampler drew them. Raises ValueError where q is not known.
    """
    if samples.log_q is None or any(value != value for value in samples.log_q):
        raise ValueError(
            "these samples have no importance weights: they need a regex or json_schema, given_order ascending, and a "
            "sampler other than confidence and threshold, whose order depends on the tokens"
        )
    any_order, found = as_any_order(system), list[Tensor]()
    for first in range(0, len(samples), batch_size):
        some = samples.tokens[first : first + batch_size]
        drawn = [[p for step in steps for p in step] for steps in samples.steps[first : first + batch_size]]
        x, valid = padded(some)
        sigma, given = torch.zeros_like(x), torch.zeros_like(valid)
        for row, (ids, order) in enumerate(zip(some, drawn, strict=True)):
            known = sorted(set(range(len(ids))) - set(order))
            sigma[row] = torch.tensor([*known, *order, *range(len(ids), x.shape[1])])
            given[row, known] = True
        batch = Batch(x, None if bool(valid.all()) else valid, given).to(net.device)
        with torch.no_grad():
            nats = any_order.order_nats(net, batch, sigma.to(net.device)).cpu().double()
        found.append(-nats.sum(1))
    return torch.cat(found) - torch.tensor(samples.log_q, dtype=torch.float64)
