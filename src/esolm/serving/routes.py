"""The HTTP application: routes, keys, limits and errors."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    from fastapi import FastAPI
    from fastapi import Request as HttpRequest
    from fastapi.exceptions import HTTPException
    from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
    from fastapi.staticfiles import StaticFiles
    from fastapi_offline import FastAPIOffline  # /docs without a CDN
except ImportError as error:
    raise ImportError("esolm.serving.routes needs more packages: pip install 'esolm[serve]'") from error

from .. import __version__
from . import api, bodies, refusals
from .api import Server
from .choices import pieces
from .engine import Engine
from .options import UNSERVED, ServerOptions
from .replies import ApiError
from .scores import score

PAGE = Path(__file__).parent / "page"
OPEN = ("/", "/health", "/ready", "/page", "/docs", "/openapi.json")
"""Paths that need no key."""
STATUSES: dict[int | str, str] = {
    400: "A value is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such path or model.",
    413: "The request is too large.",
    429: "The queue is full; `Retry-After` says when to try again.",
    "4XX": "Another error of the client.",
    500: "The model failed.",
    503: "The server is stopping.",
    504: "The request took too long.",
}
"""Errors of every route, for the OpenAPI document."""
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
Scope = MutableMapping[str, Any]


class Guard:
    """Checks the key and the size of every request, also of those that do not declare theirs, and counts responses.

    Plain ASGI, so that the application learns at once when a client goes away.
    """

    def __init__(self, app: Any, server: Server) -> None:
        self.app, self.most, self.measures = app, server.options.max_body, server.measures
        key = server.options.api_key
        self.expected = None if key is None else f"Bearer {key}".encode()

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused before it is read."""
        headers, path = dict(scope["headers"]), scope["path"]
        public = path in OPEN or path.startswith(("/page/", "/static-offline-docs/"))
        found = headers.get(b"authorization", b"")
        if self.expected is not None and not public and not hmac.compare_digest(found, self.expected):
            return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY")
        declared = headers.get(b"content-length", b"0")
        return self.too_large if declared.isdigit() and int(declared) > self.most else None

    @property
    def too_large(self) -> ApiError:
        """The error for a body that is too large."""
        return ApiError(413, f"the request is larger than {self.most} bytes")

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Scope]], send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        seen = 0

        async def counted() -> Scope:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:  # the only kind of exception that FastAPI lets through
                raise HTTPException(413, self.too_large.message)
            return message

        async def noted(message: Scope) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.measures.responded(path, message["status"])
            await send(message)

        error = self.refusal(scope)
        app = self.app if error is None else error.response()
        await app(scope, counted, noted)


def make_app(engine: Engine, options: ServerOptions | None = None) -> FastAPI:
    """The application; it starts the engine and stops it when it ends."""
    options = options or ServerOptions()
    server = Server(engine, replace(options, name=options.name or "esolm"))

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": bodies.ErrorReply, "description": about} for status, about in STATUSES.items()
    }
    app = FastAPIOffline(title="esolm", version=__version__, lifespan=life, redoc_url=None, responses=errors)
    app.state.server = server
    app.add_middleware(Guard, server=server)
    refusals.add(app)
    _generation_routes(app, server)
    _model_routes(app, server)
    _other_routes(app, server)
    app.mount("/page", StaticFiles(directory=PAGE, check_dir=False), name="page")
    return app


def _generation_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=EVENTS)
    async def completions(body: bodies.CompletionBody, request: HttpRequest) -> Response:
        """OpenAI's completions; with `suffix`, the text between prompt and suffix."""
        return await api.complete(server, body, request)

    @app.post("/v1/fim/completions", responses=EVENTS)
    async def fim(body: bodies.FimBody, request: HttpRequest) -> Response:
        """Mistral's fill-in-the-middle: the same with a choice's text as a message."""
        changed = body if body.random_seed is None else body.model_copy(update={"seed": body.random_seed})
        return await api.complete(server, changed, request)

    @app.post("/infill", responses=EVENTS)
    async def llama_infill(body: bodies.LlamaInfillBody, request: HttpRequest) -> Response:
        """llama.cpp's infill: the text between input_prefix and input_suffix."""
        return await api.llama_infill(server, body, request)

    @app.post("/v1/infill", responses=EVENTS)
    async def infill(body: bodies.InfillBody, request: HttpRequest) -> Response:
        """Fill in the blanks of a text, or the nulls among token ids."""
        return await api.infill(server, body, request)


def _model_routes(app: FastAPI, server: Server) -> None:
    lm, engine = server.lm, server.engine

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model of this server, with what it can do."""
        system = lm.system
        samplers = {name: [o for o in taken if o not in UNSERVED] for name, taken in system.samplers.items()}
        about = {"system": system.name, "samplers": samplers, "max_length": engine.max_length}
        about["block_size"], about["eos_id"] = system.block_size, lm.tokenizer.eos_id
        own = {"id": server.options.name, "object": "model", "created": server.created, "owned_by": "esolm"}
        return {"object": "list", "data": [{**own, **about}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name."""
        server.check_model(name)
        found: dict[str, Any] = (await models())["data"][0]
        return found


def _other_routes(app: FastAPI, server: Server) -> None:
    lm, engine = server.lm, server.engine

    @app.post("/v1/score")
    async def log_likelihood(body: bodies.ScoreBody, request: HttpRequest) -> dict[str, Any]:
        """log p of texts, in nats, given any of their positions."""
        server.check_model(body.model)
        return await score(server, body, request)

    @app.post("/tokenize")
    async def tokenize(body: bodies.TokenizeBody) -> dict[str, Any]:
        """The token ids of a text."""
        text = body.content if body.content is not None else body.prompt
        if text is None:
            raise ApiError(400, "content is missing", "content")
        ids = lm.tokenizer.encode(text)
        more = {"pieces": pieces(lm.tokenizer, ids)} if body.with_pieces else {}
        return {"tokens": ids, "count": len(ids), "max_model_len": engine.max_length, **more}

    @app.post("/detokenize")
    async def detokenize(body: bodies.DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        bad = [token for token in body.tokens if not 0 <= token < lm.net.config.vocab_size]
        if bad:
            raise ApiError(400, f"token {bad[0]} is not in the vocabulary of {lm.net.config.vocab_size}", "tokens")
        text = lm.tokenizer.decode(body.tokens)
        more = {"pieces": pieces(lm.tokenizer, body.tokens)} if body.with_pieces else {}
        return {"content": text, "prompt": text, **more}

    @app.get("/health")
    async def health() -> Response:
        """Whether the engine runs."""
        return JSONResponse({"status": "ok" if engine.alive else "dead"}, 200 if engine.alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are accepted."""
        fine = engine.alive and not engine.scheduler.closed
        return JSONResponse({"status": "ready" if fine else "stopping"}, 200 if fine else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return PlainTextResponse(server.measures.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")
