"""The answers of the HTTP API: OpenAI's completions with suffix, and infilling at any positions. See routes.py."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

try:
    from fastapi import Request as HttpRequest
    from fastapi.responses import JSONResponse, Response, StreamingResponse
except ImportError as error:
    raise ImportError("esolm.serving.api needs fastapi: pip install 'esolm[serve]'") from error

from ..constraints.guide import PatternSpan
from ..data import Tokenizer
from ..generation.limits import spans_of
from ..generation.rows import Blanked, Row
from ..sampling.options import SamplingOptions
from . import bodies
from .choices import Choice, completion_rows, infilled, step_event
from .engine import Engine
from .measures import Measures
from .options import ServerOptions
from .replies import END_OF_STREAM, ApiError, Group, failure, sse
from .scores import on_engine


class Server:
    """The state behind the routes."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine, self.options, self.lm = engine, options, engine.lm
        self.measures = Measures(engine)
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name not in (None, "", self.options.name):
            text = f"model is {name!r}; this server has {self.options.name!r}"
            raise ApiError(404, text, "model", "model_not_found")

    def sampling_options(self, body: bodies.SamplingBody) -> SamplingOptions:
        """The options of a request; without a seed, a random one."""
        return body.sampling_options(body.seed if body.seed is not None else secrets.randbits(53))

    def group(
        self,
        body: bodies.SamplingBody,
        options: SamplingOptions,
        rows: list[Row],
        spans: list[list[PatternSpan]],
        top: int | None,
        choices: list[Choice] | None,
    ) -> Group:
        """The generations of a request: body.n for each prompt, with a row and its constrained spans for each."""
        self.check_model(body.model)
        total, most = len(rows), min(self.options.max_n, self.engine.options.max_queue)
        if total > most:
            raise ApiError(400, f"{total} samples in one request; at most {most} are allowed", "n")
        group = Group(self.engine, self.measures, bool(body.stream), body.n)
        for i in range(total):
            ended = choices[i].ended if choices is not None else None
            more = {"top_logprobs": top, "listen": group.listener(i, ended), "seconds": self.options.timeout}
            group.members.append(self.engine.generation(rows[i], options, i, total, spans=spans[i], **more))
        return group

    def too_long(self, what: str) -> ApiError:
        """The reply to a request for more tokens than a sample may have."""
        text = f"{what}; at most {self.engine.max_length} are possible (the server's --max_length)"
        return ApiError(400, text, "max_tokens", "context_length_exceeded")

    async def completion(self, body: bodies.CompletionBody) -> tuple[Group, list[Choice]]:
        """The generations and choices of a completion."""
        most = 16 if body.max_tokens is None else body.max_tokens
        block = self.lm.system.block_size
        if most > self.engine.max_length:
            raise self.too_long(f"max_tokens is {most}")
        found = completion_rows(self.lm.tokenizer, body.prompts, body.suffix, most, block)
        rows = [row for row, _, _ in found for _ in range(body.n)]
        if (longest := max(map(len, rows), default=0)) > self.engine.max_length:
            raise self.too_long(f"prompt, suffix and max_tokens are {longest} tokens")
        tokenizer = self.lm.tokenizer
        spans = [(start, count) for _, start, count in found for _ in range(body.n)]
        choices = [Choice(i, *span, body.stops, tokenizer) for i, span in enumerate(spans)]
        options, limited = self.sampling_options(body), list[list[PatternSpan]]()
        for row, start, count in found:
            own = await compiled_spans(tokenizer, row, options, "all", [(start, start + count)])
            limited += [own] * body.n
        group = self.group(body, options, rows, limited, body.logprobs, choices)
        for choice, generation in zip(choices, group.members, strict=True):
            choice.generation = generation
        return group, choices

    def usage(self, group: Group, choices: list[Choice] | None) -> dict[str, int]:
        """Counts of tokens, as OpenAI reports them."""
        given = sum(g.length - len(g.drawn) for g in group.members[:: group.each])  # a prompt counts once
        made = sum(len(c.ids) for c in choices) if choices is not None else sum(len(g.chosen) for g in group.members)
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def head(server: Server, kind: str, group: Group) -> dict[str, Any]:
    """The fields that every answer begins with."""
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": server.options.name,
        "seed": group.members[0].options.seed,
    }


async def complete(server: Server, body: bodies.CompletionBody, request: HttpRequest) -> Response:
    """Answer a request for completions."""
    group, choices = await server.completion(body)
    if body.stream:
        return await streamed(group, complete_stream(server, body, group, choices))
    async with group:
        await group.finished(request)
        found = [_choice(body, choice) for choice in choices]
    return JSONResponse(
        {**head(server, "text_completion", group), "choices": found, "usage": server.usage(group, choices)}
    )


def _choice(body: bodies.CompletionBody, choice: Choice) -> dict[str, Any]:
    before = _echo(body, choice)
    found: dict[str, Any] = {"index": choice.index, "text": before + choice.text, "finish_reason": choice.reason}
    if isinstance(body, bodies.FimBody):  # Mistral's clients read a message
        found["message"] = {"role": "assistant", "content": found["text"]}
    return {**found, "logprobs": None if body.logprobs is None else choice.logprobs(len(before))}


def _echo(body: bodies.CompletionBody, choice: Choice) -> str:
    if not body.echo or choice.generation is None:
        return ""
    prompt = body.prompts[choice.index // body.n]
    return prompt if isinstance(prompt, str) else choice.tokenizer.decode(prompt)


async def complete_stream(
    server: Server, body: bodies.CompletionBody, group: Group, choices: list[Choice]
) -> AsyncIterator[str]:
    """Deltas of what is final from the left, and typed events if the client wants them."""
    common, said = head(server, "text_completion", group), set[int]()
    async for index, new in group.events():
        choice, generation = choices[index], group.members[index]
        if body.stream_positions and new:
            yield sse(step_event(index, generation, new), "step")
        if not new and (error := failure(generation)):
            yield sse(error.body)
            return
        text = choice.take()
        if index not in said and (before := _echo(body, choice)):
            text = before + text
        if not text and new:
            continue
        said.add(index)
        lists = choice.logprobs(0, rest=True) if body.logprobs is not None else None
        delta = {"index": index, "text": text, "finish_reason": None if new else choice.reason, "logprobs": lists}
        if isinstance(body, bodies.FimBody):
            delta["delta"] = {"content": text}
        yield sse({**common, "choices": [delta]})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield sse({**common, "choices": [], "usage": server.usage(group, choices)})
    yield END_OF_STREAM


async def infill(server: Server, body: bodies.InfillBody, request: HttpRequest) -> Response:
    """Answer a request to fill in blanks or nulls."""
    options = server.sampling_options(body)
    rows, spans = await infill_rows(server, body, options, request)
    group = server.group(body, options, rows, spans, body.logprobs, None)
    if body.stream:
        return await streamed(group, infill_stream(server, group))
    async with group:
        await group.finished(request)
    found = [infilled(i, generation) for i, generation in enumerate(group.members)]
    return JSONResponse({**head(server, "infill", group), "choices": found, "usage": server.usage(group, None)})


async def infill_rows(
    server: Server, body: bodies.InfillBody, options: SamplingOptions, request: HttpRequest
) -> tuple[list[Row], list[list[PatternSpan]]]:
    """The rows of the samples, and their spans that must match a pattern. Raises ValueError."""
    lm = server.lm
    if body.n > server.options.max_n:
        raise ApiError(400, f"{body.n} samples in one request; at most {server.options.max_n} are allowed", "n")
    if body.text is None:
        row = list(body.tokens or ())
        lm.check_rows([row])
        spans = await compiled_spans(lm.tokenizer, row, options, "none")
        return [row] * body.n, [spans] * body.n
    cut = Blanked.of(lm.tokenizer, body.text, body.blank)
    candidates = cut.candidates(body.tokens_per_blank)
    most = len(cut.row([max(sizes) for sizes in candidates]))
    if most > server.engine.max_length:
        raise ApiError(400, f"{most} tokens with the blanks; at most {server.engine.max_length} are possible", "text")
    asked = (body.text, body.blank, body.tokens_per_blank, options, body.length_prior)
    sizes = [least[0] for least in candidates]
    await compiled_spans(lm.tokenizer, cut.row(sizes), options, "none", cut.spans(sizes), cut.leads)
    if all(len(sizes) == 1 for sizes in candidates):
        return lm.blanked_rows(range(body.n), body.length_choice, *asked)
    return await on_engine(server, lambda _: lm.blanked_rows(range(body.n), body.length_choice, *asked), request)


async def compiled_spans(tokenizer: Tokenizer, row: Row, options: SamplingOptions, *more: Any) -> list[PatternSpan]:
    """`spans_of` on a thread of its own: neither the event loop nor the engine waits while a pattern is compiled."""
    if (options.regex, options.json_schema, options.match) == (None, None, None):
        return []
    return await asyncio.to_thread(spans_of, tokenizer, row, options, *more)


async def infill_stream(server: Server, group: Group) -> AsyncIterator[str]:
    """The tokens of each step at their positions, and the texts as they end."""
    common = head(server, "infill", group)
    for index, generation in enumerate(group.members):
        given = [None if i in generation.drawn else token for i, token in enumerate(generation.tokens)]
        yield sse({**common, "object": "start", "index": index, "tokens": given}, "start")
    async for index, new in group.events():
        generation = group.members[index]
        if new:
            yield sse(step_event(index, generation, new), "step")
        elif error := failure(generation):
            yield sse(error.body, "error")
            return
        else:
            yield sse({**common, "choices": [infilled(index, generation)]})
    yield sse({**common, "choices": [], "usage": server.usage(group, None)})
    yield END_OF_STREAM


class EventResponse(StreamingResponse):
    """Server-sent events about a group; a client that goes away frees its rows, also before the first event."""

    def __init__(self, group: Group, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.group = group

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            await self.group.__aexit__()


async def streamed(group: Group, events: AsyncIterator[str]) -> EventResponse:
    """Submit the group and answer with events; a full queue is an error with its own status, not an event."""
    await group.__aenter__()
    return EventResponse(group, events)


async def llama_infill(server: Server, body: bodies.LlamaInfillBody, request: HttpRequest) -> Response:
    """Answer a request of llama.cpp's /infill, in its form."""
    most = 16 if body.n_predict is None or body.n_predict < 0 else max(body.n_predict, 1)
    own = {name: getattr(body, name) for name in bodies.SamplingBody.model_fields if name != "stream_positions"}
    own |= {"prompt": body.input_prefix + body.prompt, "suffix": body.input_suffix or None, "max_tokens": most}
    whole = bodies.CompletionBody(**{**own, "stop": body.stop, "n": 1})
    group, choices = await server.completion(whole)
    if body.stream:
        return await streamed(group, _llama_stream(group, choices[0]))
    async with group:
        await group.finished(request)
    return JSONResponse(_llama(group, choices[0], choices[0].text))


def _llama(group: Group, choice: Choice, text: str) -> dict[str, Any]:
    given = group.members[0].length - len(group.members[0].drawn)
    return {
        "index": 0,
        "content": text,
        "stop": choice.reason is not None,
        "stop_type": {"length": "limit", "stop": "eos"}.get(choice.reason or "", "none"),
        "tokens_predicted": len(choice.ids),
        "tokens_evaluated": given,
    }


async def _llama_stream(group: Group, choice: Choice) -> AsyncIterator[str]:
    async for _, new in group.events():
        if not new and (error := failure(group.members[0])):
            yield sse(error.body)
            return
        if (text := choice.take()) or not new:
            yield sse(_llama(group, choice, text))
