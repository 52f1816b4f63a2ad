"""Reads the body of a request: at most so many bytes, in at most so much time, and as JSON that has one object."""

import asyncio
import json
import time
from typing import NoReturn

from starlette.types import Receive, Scope

from octavo.request import limits
from octavo.request.errors import DeadlineExceeded, InvalidArgument, MessageTooLarge
from router.http.bodies.unknown_fields import REFUSE, ClientBody

MAX_BODY_BYTES = limits.MAX_MESSAGE_BYTES
SMALL_BODY_BYTES = 64 * 1024
BODY_S = 30.0  # how long a body may take to arrive
LEAST_RATE = 512 * 1024  # bytes a second, of what is larger


class BodyReader:
    """Reads bodies. Of large ones only so many are in memory at a time: a further one displaces the slowest of them."""

    def __init__(self, max_large: int = 32) -> None:
        self._max_large = max_large
        self._large: set[ArrivingBody] = set()

    async def read(self, scope: Scope, receive: Receive, reserved: int = 0) -> bytes:
        """The whole body. There is room for `reserved` bytes, of one that is larger than others may be.

        Raises MessageTooLarge or DeadlineExceeded.
        """
        most = max(MAX_BODY_BYTES, reserved)
        if announced_bytes(scope) > most:
            raise body_too_large(most)
        try:
            async with asyncio.timeout(BODY_S) as limit:
                body = ArrivingBody(limit)
                try:
                    return await self._gather(body, receive, most)
                finally:
                    self._large.discard(body)
        except TimeoutError:
            longer = f", and one s more for each {LEAST_RATE} bytes that have come" if reserved else ""
            what = f"the body came too slowly: it may take {BODY_S:.0f} s{longer}, and less while many large ones come"
            raise DeadlineExceeded(what) from None

    async def _gather(self, body: "ArrivingBody", receive: Receive, most: int) -> bytes:
        more = True
        while more:
            message = await receive()
            body.add(message.get("body", b""))
            more = message.get("more_body", False)
            if body.size > most:
                raise body_too_large(most)
            if most > MAX_BODY_BYTES:
                body.go_on()
            if more and body.size > SMALL_BODY_BYTES and most == MAX_BODY_BYTES:
                self._admit(body)
        return body.data

    def _admit(self, body: "ArrivingBody") -> None:
        if body not in self._large and len(self._large) >= self._max_large:
            slowest = min(self._large, key=lambda each: each.rate())
            self._large.discard(slowest)
            slowest.displace()
        self._large.add(body)


class ArrivingBody:
    """A body of which parts have come."""

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._ends_at = limit.when() or 0.0
        self._began = time.monotonic()
        self._parts: list[bytes] = []
        self.size = 0

    @property
    def data(self) -> bytes:
        return b"".join(self._parts)

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)

    def go_on(self) -> None:
        """Gives what else there is the time that what has come has earned."""
        self._limit.reschedule(self._ends_at + self.size / LEAST_RATE)

    def rate(self) -> float:
        """Bytes per second so far."""
        return self.size / (time.monotonic() - self._began + 0.1)

    def displace(self) -> None:
        """Ends the reading of this body, and frees its memory."""
        self._parts.clear()
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())


def header_of(scope: Scope, name: bytes) -> str:
    """The value of a header; empty without one."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def announced_bytes(scope: Scope) -> int:
    """How long a body is, as its header says; 0 if it does not."""
    announced = header_of(scope, b"content-length")
    return int(announced) if announced.isascii() and announced.isdigit() else 0


def body_too_large(most: int = MAX_BODY_BYTES) -> MessageTooLarge:
    return MessageTooLarge(f"the body has more than {most} bytes; send fewer")


def parse_object(data: bytes, unknown_fields: str = REFUSE) -> ClientBody:
    """The object that the bytes hold. Raises InvalidArgument."""
    try:
        found = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of 5000 digits; nested too deep
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidArgument("body", f"is not JSON{place}") from None
    if not isinstance(found, dict):
        raise InvalidArgument("body", "must be a JSON object")
    return ClientBody(found, unknown_fields)


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
