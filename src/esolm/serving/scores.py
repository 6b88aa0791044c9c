"""Likelihood over HTTP: `lm.log_prob` on the engine's thread, in parts with passes of the engine between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..likelihood.orders import NotFinite
from .scheduler import Between

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest

    from .api import Server
    from .bodies import ScoreBody

PART = 2048
"""Tokens that are scored in one call: the longest time, in tokens, that running requests wait."""


async def score(server: Server, body: ScoreBody, request: HttpRequest) -> dict[str, Any]:
    """The answer of /v1/score. Raises ValueError for what the model cannot score."""
    texts: list[Any] = [body.text] if isinstance(body.text, str) else list(body.text or body.tokens or ())
    work = len(texts) * body.num_orders
    if work > server.options.max_score:
        most = server.options.max_score
        raise ValueError(f"{len(texts)} texts times {body.num_orders} orders; at most {most} in one request")
    options = {name: getattr(body, name) for name in ("estimator", "num_orders", "antithetic", "given_order", "seed")}

    options["batch_size"] = max(1, min(32, PART // server.lm.net.config.length))

    def compute(between: Between) -> dict[str, Any]:
        more = {**options, "advance": lambda done: between()}
        found = server.lm.log_prob(texts, body.context, body.given, body.alpha_0, **more)
        weights = found.log_weights
        errors = [None] * len(texts) if weights.shape[1] == 1 else standard_error(weights).tolist()
        totals = found.total.tolist()
        data = [
            {"index": i, "log_prob": totals[i], "standard_error": errors[i], "token_log_probs": found.tokens[i]}
            for i in range(len(texts))
        ]
        return {"object": "scores", "kind": found.kind, "num_orders": weights.shape[1], "data": data}

    result = await on_engine(server, compute, request)
    return {**result, "estimator": body.estimator, "model": server.options.name}


async def on_engine(server: Server, compute: Callable[[Between], Any], request: HttpRequest) -> Any:
    """What a function returns that calls the network, run on the engine's thread. Raises ApiError."""
    from .replies import ApiError, unless_gone

    errand = server.engine.errand(compute, server.options.timeout)
    try:
        return await unless_gone(asyncio.wrap_future(errand.found), request)
    except (TimeoutError, NotFinite) as error:
        raise ApiError(504 if isinstance(error, TimeoutError) else 500, str(error)) from error
    finally:
        errand.cancelled = True


def standard_error(log_weights: torch.Tensor) -> torch.Tensor:
    """Of log mean_k w_k by the delta method, [n]: the standard error of the mean weight over the mean."""
    w = (log_weights - log_weights.amax(1, keepdim=True)).exp()
    return w.std(1) / w.mean(1) / w.shape[1] ** 0.5
