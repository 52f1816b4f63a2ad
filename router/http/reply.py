"""The answer to one HTTP request: a JSON object, a stream of server-sent events, or an error."""

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Self

from starlette.types import Send

from octavo.request.errors import (
    Code,
    FieldViolation,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    NoWorkers,
    ServingError,
)
from router.http.bodies.unknown_fields import ignored_header

# OpenAI's SDKs retry 408, 409, 429 and every status from 500 on, so no error that a retry cannot help has one of these
# but a conflict, which they meet only if they choose request ids.
STATUSES = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# The names of fields in octavo.v1 that have other names in OpenAI's bodies.
FIELDS = [
    (re.compile(r"^sampling\.include_stop$"), "include_stop_str_in_output"),
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^chat\.messages"), "messages"),
    (re.compile(r"^chat\.(tools|continue_final_message)"), r"\1"),
    (re.compile(r"^chat\.template_kwargs_json"), "chat_template_kwargs"),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^(text|raw_text|token_ids)$"), "prompt"),
    (re.compile(r"\.raw_content$"), ".content"),
    (re.compile(r"\.parts\[(\d+)\]\.picture_url$"), r".content[\1].image_url"),
    (re.compile(r"\.arguments_json$"), ".function.arguments"),
    (re.compile(r"\.parameters_json$"), ".function.parameters"),
    (re.compile(r"^(tools\[\d+\]|.*\.tool_calls\[\d+\])\.name$"), r"\1.function.name"),
    (re.compile(r"\.extra_json$"), ""),
]
PING = b": the request waits\n\n"  # a comment of server-sent events, which clients skip
# A stream in which nothing happens says so this often: balancers end connections that are silent for a minute, and a
# client that has gone is noticed.
PING_S = 15.0
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes each event on at once
]


NO_WORKERS_MS = 3000


def status_of(error: ServingError) -> int:
    if isinstance(error, MessageTooLarge):
        return 413
    return STATUSES.get(error.code, 500)


def headers_of(error: ServingError) -> list[tuple[bytes, bytes]]:
    """The headers that say when to come back: in whole seconds for HTTP, in milliseconds for OpenAI's SDKs."""
    if not error.retry_after_ms:
        return []
    # OpenAI's clients try twice more and no oftener, so the first worker has to be met by then.
    pause_ms = max(error.retry_after_ms, NO_WORKERS_MS) if isinstance(error, NoWorkers) else error.retry_after_ms
    seconds = max(1, math.ceil(pause_ms / 1000))
    return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % pause_ms)]


def content_of(error: ServingError) -> dict[str, Any]:
    """The body: {"error": {"message", "type", "param", "code"}}. `param` is the first wrong field."""
    message, param, code = error.message, None, error.reason.lower()
    if isinstance(error, InvalidArgument) and error.violations:
        named = [(field_name(field), what) for field, what in error.violations]
        message, param = "; ".join(f"{field}: {what}" for field, what in named), named[0][0]
    elif isinstance(error, NotFound) and error.resource == "model":
        param, code = "model", "model_not_found"
    status = status_of(error)
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def field_name(field: str) -> str:
    """A field of octavo.v1 as OpenAI's bodies name it."""
    for pattern, name in FIELDS:
        field = pattern.sub(name, field)
    return field


def named_as(places: Mapping[str, str], error: ServingError) -> ServingError:
    """The error with the fields of a body, whose names are `places`."""
    if not places or not isinstance(error, InvalidArgument) or not error.violations:
        return error
    first, *others = (FieldViolation(places.get(field, field), what) for field, what in error.violations)
    return InvalidArgument(*first, *others)


class Reply:
    """Sends one answer, which an `async with` ends. Its headers name the request by its id, once it has one, and by the
    name that the client gave it.
    """

    PING: ClassVar[bytes] = PING

    def __init__(self, send: Send, called: str = "") -> None:
        """`called` is what the client calls the request, for its own logs."""
        self.request_id = ""
        self.ignored: Sequence[str] = ()  # fields of the body that were left out of account
        self.places: Mapping[str, str] = {}  # where the body has what the request has, if `field_name` does not say it
        self._called = called
        self._send = send
        self._streams = False
        self._sent_at = 0.0  # by the event loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """A ServingError ends the answer, and goes no further."""
        try:
            if isinstance(error, ServingError):
                await self.send_error(error)
                return True
            return False
        finally:
            self._end_pings()

    def name_request(self, request_id: str) -> None:
        """Headers name the request by its id, if the id may stand in one."""
        if request_id.isascii() and request_id.isprintable():
            self.request_id = request_id

    async def send_object(self, content: Mapping[str, Any] | bytes, status: int = 200, headers: Any = ()) -> None:
        """Sends a JSON object, or the bytes of one."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self._send_whole(b"application/json", body, status, headers)

    async def send_text(self, text: str, headers: Any = ()) -> None:
        """Sends a plain text."""
        await self._send_whole(b"text/plain; charset=utf-8", text.encode(), headers=headers)

    async def _send_whole(self, kind: bytes, body: bytes, status: int = 200, headers: Any = ()) -> None:
        own = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await self._start(status, [*own, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def send_error(self, error: ServingError) -> None:
        """Ends the answer with an error. In a stream it is an event, and the last one: no [DONE] follows."""
        error = named_as(self.places, error)
        if self._streams:
            await self.end_stream(self.error_event(error))
            return
        status = status_of(error)
        # What is left of a body that was refused is not read.
        closing = [(b"connection", b"close")] if status in (413, 504) else []
        await self.send_object(self.shown_error(error), status, [*headers_of(error), *closing])

    def shown_error(self, error: ServingError) -> dict[str, Any]:
        """The body of an error."""
        return content_of(error)

    def error_event(self, error: ServingError) -> bytes:
        """The last event of a stream that ends with an error."""
        return b"data: " + json.dumps({**self.shown_error(error), "id": self.request_id}).encode() + b"\n\n"

    # Streams

    @property
    def streams(self) -> bool:
        """Whether a stream has begun."""
        return self._streams

    async def begin_stream(self) -> None:
        """The request is accepted: the client gets its id before any token. It may be called again."""
        if self._streams:
            return
        await self._start(200, EVENT_STREAM)
        self._streams = True
        self._note_sent()
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._note_silence)

    async def send_events(self, data: bytes) -> None:
        """Sends events that are encoded already. Waits while the client reads more slowly than they come."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._note_sent()

    async def end_stream(self, data: bytes) -> None:
        self._end_pings()
        await self._send({"type": "http.response.body", "body": data})

    def _end_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, *self._names()]
        if self.ignored:
            headers.append((b"x-octavo-ignored-fields", ignored_header(self.ignored).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _names(self) -> list[tuple[bytes, bytes]]:
        """The headers that name the request."""
        name, own = self._called or self.request_id, self._called and self.request_id
        more = [(b"x-octavo-request-id", own.encode())] if own else []
        return [(b"x-request-id", name.encode()), *more] if name else []

    def _note_sent(self) -> None:
        self._sent_at = asyncio.get_running_loop().time()

    def _note_silence(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._sent_at >= PING_S:
            self._ping = asyncio.create_task(self._send_ping())
            self._note_sent()
        self._timer = loop.call_at(self._sent_at + PING_S, self._note_silence)

    async def _send_ping(self) -> None:
        with suppress(RuntimeError):  # the stream has ended meanwhile
            await self._send({"type": "http.response.body", "body": self.PING, "more_body": True})
