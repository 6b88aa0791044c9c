"""Errors of requests in OpenAI's form: what was wrong, in which field, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

try:
    from fastapi import FastAPI
    from fastapi import Request as HttpRequest
    from fastapi.exceptions import RequestValidationError
    from fastapi.exceptions import StarletteHTTPException as HTTPException  # also of unknown paths
    from fastapi.responses import Response
except ImportError as error:
    raise ImportError("esolm.serving.refusals needs more packages: pip install 'esolm[serve]'") from error

from . import bodies
from .replies import ApiError
from .scheduler import QueueFull, Stopping

FIELDS = {
    field
    for body in vars(bodies).values()
    if isinstance(body, type) and issubclass(body, bodies.BaseModel) and body.__name__.endswith("Body")
    for field in body.model_fields
}
"""Every field of every route."""
ABOUT = {
    "has no sampler": "sampler", "the text has no blank": "text", "no text to score": "text",
    "of the vocabulary, or": "prompt",
}  # fmt: skip
"""The field that messages of the library are about which do not begin with one."""
ELSEWHERE = {
    "response_format": "json_schema", "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "regex",
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "n_predict": "max_tokens",
}  # fmt: skip
"""What fields of other servers are called here."""


def add(app: FastAPI) -> None:
    """Answer every error of the application in OpenAI's form."""

    async def known(request: HttpRequest, error: Exception) -> Response:
        return refusal(request, error).response()

    async def invalid(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return wrong_body(error.errors()[0], request.headers).response()

    async def unexpected(_: HttpRequest, error: Exception) -> Response:
        return ApiError(500, f"the server failed: {type(error).__name__}").response()  # Starlette logs the rest

    app.add_exception_handler(Exception, unexpected)
    for kind in (ApiError, QueueFull, Stopping, ValueError, HTTPException):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)


def refusal(request: HttpRequest, error: Exception) -> ApiError:
    """The reply to a request that was understood and cannot be answered."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, Stopping):
        return ApiError(503, str(error))
    if isinstance(error, HTTPException):
        path, unknown = request.url.path, error.status_code == 404 and error.detail == "Not Found"
        if unknown and path.endswith("/chat/completions"):
            return ApiError(404, "this server has no chat route: use /v1/completions")
        return ApiError(error.status_code, f"no route {path}: see /docs" if unknown else str(error.detail))
    return ApiError(400, str(error), named(str(error)))  # a value that the library refuses


def named(message: str) -> str | None:
    """The field that a message begins with, or is about."""
    word = message.partition(" ")[0].rstrip(":")
    return word if word in FIELDS else next((field for part, field in ABOUT.items() if part in message), None)


def wrong_body(problem: Mapping[str, Any], headers: Mapping[str, str]) -> ApiError:
    """The reply to a body that pydantic refuses."""
    kind, place = problem["type"], [part for part in problem["loc"][1:] if isinstance(part, str)]
    if kind == "json_invalid":
        where = f" at character {problem['loc'][-1]}" if isinstance(problem["loc"][-1], int) else ""
        return ApiError(400, f"the body is not JSON: {problem.get('ctx', {}).get('error', 'it cannot be read')}{where}")
    if not place and kind in ("model_attributes_type", "dict_type"):
        if "json" not in headers.get("content-type", ""):
            return ApiError(400, "the body was not read as JSON: send the header Content-Type: application/json")
        return ApiError(400, "the body must be a JSON object")
    if kind == "extra_forbidden":
        field = ".".join(place)
        return ApiError(400, f"{field} is not a field of this route{hint(place[-1])}", field)
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return ApiError(400, message, named(message))
    return ApiError(400, f"{place[0]}: {message}", place[0])  # what follows names types of pydantic


def hint(field: str) -> str:
    """What a field that does not exist may have meant."""
    if field in FIELDS:
        return ", only of others: /docs lists the fields of each"
    near = [ELSEWHERE[field]] if field in ELSEWHERE else difflib.get_close_matches(field, FIELDS, 1, 0.8)
    return f": did you mean {near[0]}?" if near else ": leave it out"
