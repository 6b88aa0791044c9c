"""HTTP replies: errors in OpenAI's form, server-sent events, and the wait for generations on the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

try:
    from fastapi import Request as HttpRequest
    from fastapi.responses import JSONResponse
except ImportError as error:
    raise ImportError("esolm.serving.replies needs fastapi: pip install 'esolm[serve]'") from error

from .engine import Engine
from .measures import Measures
from .request import CANCELLED, DONE, FAILED, Chosen, Generation
from .scheduler import TIMED_OUT

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
END_OF_STREAM = "data: [DONE]\n\n"


class ApiError(Exception):
    """A reply with an error: status, message, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's JSON."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response of this error, with the headers that its status needs."""
        headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "10"}, 401: {"WWW-Authenticate": "Bearer"}}
        return JSONResponse(self.body, self.status, headers.get(self.status))


def failure(generation: Generation) -> ApiError | None:
    """The error of a generation that did not finish."""
    if generation.state == FAILED:
        return ApiError(504 if generation.error == TIMED_OUT else 500, generation.error or "the sample failed")
    return ApiError(503, "the server is stopping") if generation.state == CANCELLED else None


def sse(data: dict[str, Any], event: str | None = None) -> str:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def unless_gone(waiting: asyncio.Future[Any], request: HttpRequest) -> Any:
    """The result of a future. Raises ApiError, and cancels it, if the client goes away before."""
    try:
        while not (await asyncio.wait({waiting}, timeout=0.25))[0]:
            if await request.is_disconnected():
                raise ApiError(499, "the client went away")
        return waiting.result()
    finally:
        waiting.cancel()


class Group:
    """The generations of one HTTP request, `each` of them for one prompt; watch: report every step.

    Leaving the context cancels those that have not ended.
    """

    def __init__(self, engine: Engine, measures: Measures, watch: bool, each: int = 1) -> None:
        self.engine, self.measures, self.each = engine, measures, each
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[tuple[int, Sequence[Chosen]]] = asyncio.Queue()
        self.members: list[Generation] = []
        self.watch = watch
        self.begin, self.first_token = time.monotonic(), None  # type: tuple[float, float | None]

    def listener(
        self, index: int, ended: Callable[[], bool] | None = None
    ) -> Callable[[Generation, Sequence[Chosen]], object]:
        """What the engine calls for generation `index`: hand the news to the event loop. ended: whether to end it."""

        def listen(generation: Generation, new: Sequence[Chosen]) -> None:
            if new and self.first_token is None:
                self.first_token = time.monotonic() - self.begin
            over = ended is not None and ended()
            if self.watch or generation.ended:
                self.loop.call_soon_threadsafe(self.news.put_nowait, (index, new))
            if over:
                generation.end(DONE)

        return listen

    async def __aenter__(self) -> Group:
        self.engine.submit(*self.members)
        return self

    async def __aexit__(self, *_: object) -> None:
        left = [each for each in self.members if not each.ended]
        if left:
            self.engine.cancel(*left)
        else:
            self.measures.took(self.first_token, time.monotonic() - self.begin)

    async def events(self) -> AsyncIterator[tuple[int, Sequence[Chosen]]]:
        """(index, new tokens) after each step, without tokens at the end of each generation."""
        running = len(self.members)
        while running:
            index, new = await self.news.get()
            running -= not new
            yield index, new

    async def finished(self, request: HttpRequest) -> None:
        """Wait for all. Raises ApiError if one failed or the client went away."""

        async def everyone() -> None:
            async for _ in self.events():
                pass

        await unless_gone(asyncio.ensure_future(everyone()), request)
        for each in self.members:
            if error := failure(each):
                raise error
