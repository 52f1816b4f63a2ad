"""What takes the place of grpc.aio channels, with the calls that the generated stubs make on them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from simulation.connection import Connection
from simulation.server import Metadata, ServerCall

if TYPE_CHECKING:
    from simulation.transport import Transport

FIRST_BACKOFF_S, MAX_BACKOFF_S, CONNECT_S = 0.1, 1.0, 2.0
OK = grpc.StatusCode.OK


class NotConnected(Exception):
    """The endpoint cannot be connected to."""


class SimChannel:
    """Belongs to the host that makes it. It connects when a call needs it, and again after a pause when that fails."""

    def __init__(self, transport: "Transport", endpoint: str, options: Sequence[tuple[str, Any]]) -> None:
        self.transport = transport
        self.host = transport.calling_host()
        self.endpoint = endpoint
        self._options = dict(options)
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._fails_until = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._calls: set[ClientCall] = set()
        self._closed = False

    def _method(
        self, name: str, request_serializer: Any, response_deserializer: Any, *, streams: bool, **_: Any
    ) -> Any:
        def call(
            request: Any = None, *, timeout: float | None = None, metadata: Any = None, wait_for_ready: Any = None
        ) -> "ClientCall":
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            made = ClientCall(self, name, request_serializer, response_deserializer, timeout)
            self._calls.add(made)
            made.begin(None if streams else request_serializer(request))
            return made

        return call

    unary_unary = unary_stream = partialmethod(_method, streams=False)
    stream_unary = stream_stream = partialmethod(_method, streams=True)

    async def channel_ready(self) -> None:
        while True:
            try:
                await self.connect()
                return
            except NotConnected:
                await asyncio.sleep(0.1)

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        for call in sorted(self._calls, key=lambda call: call.call_id):
            call.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.break_client()

    def forget(self, call: "ClientCall") -> None:
        self._calls.discard(call)

    async def connect(self) -> Connection:
        """Raises NotConnected, at once while the pause after a failure lasts."""
        if self._connection is not None and self._connection.usable:
            return self._connection
        if self._connecting is None:
            if asyncio.get_running_loop().time() < self._fails_until:
                raise NotConnected("connections to all backends failing")
            self._connecting = self.host.spawn(self._connect())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self.transport.open_connection(self.host, self.endpoint, self._options)
        except TimeoutError:
            raise NotConnected("timed out while connecting") from None

    def _connected(self, connecting: "asyncio.Task[Connection]") -> None:
        self._connecting = None
        if connecting.cancelled():
            return
        if connecting.exception() is None:
            self._connection, self._backoff_s = connecting.result(), FIRST_BACKOFF_S
        else:
            self._fails_until = asyncio.get_running_loop().time() + self._backoff_s
            self._backoff_s = min(1.6 * self._backoff_s, MAX_BACKOFF_S)


class ClientCall:
    """One call at its client, of any kind: it is awaited, iterated, or read and written."""

    def __init__(
        self, channel: SimChannel, method: str, serialize: Any, parse: Callable[[bytes], Any], timeout: float | None
    ) -> None:
        self._channel = channel
        self._method = method
        self._serialize = serialize
        self._parse = parse
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else self._loop.call_later(timeout, self._expire)
        self.call_id = channel.transport.new_number()
        self._connection: Connection | None = None
        self._messages: deque[tuple[bytes, ServerCall]] = deque()
        self._status: tuple[grpc.StatusCode, str, Metadata] | None = None
        self._answer: Metadata | None = None  # the initial metadata of the server
        self._is_cancelled_here = False
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None

    def begin(self, request: bytes | None) -> None:
        self._opening = self._loop.create_task(self._open(request))

    async def _open(self, request: bytes | None) -> None:
        try:
            connection = await self._channel.connect()
        except NotConnected as error:
            self.end(grpc.StatusCode.UNAVAILABLE, str(error), ())
            return
        if self._status is not None:
            return
        self._connection = connection
        connection.calls[self.call_id] = self
        timeout = None if self._deadline is None else max(0.0, self._deadline - self._loop.time())
        accept, call_id, method = self._channel.transport.accept_call, self.call_id, self._method
        connection.up.send(lambda: accept(connection, call_id, method, timeout, request))
        self._opened.set()

    # From the connection

    def add_message(self, message: bytes, sender: ServerCall) -> None:
        self._messages.append((message, sender))
        self._changed.set()

    def note_answer(self, metadata: Metadata) -> None:
        self._answer = metadata
        self._changed.set()

    def end(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        if self._status is not None:
            return
        self._status = (code, details, trailing)
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.calls.pop(self.call_id, None)
        self._channel.forget(self)
        self._changed.set()
        self._opened.set()

    def lose_connection(self, *, keep_unread: bool) -> None:
        if not keep_unread:
            self._messages.clear()
        self.end(grpc.StatusCode.UNAVAILABLE, "Socket closed", ())

    def _expire(self) -> None:
        self._messages.clear()
        self._tell_server()
        self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

    def _tell_server(self) -> None:
        if self._connection is not None:
            served, call_id = self._connection.served, self.call_id
            self._connection.up.send(lambda: call_id in served and served.pop(call_id).cancel())

    # What callers use

    def cancel(self) -> bool:
        if self.done():
            return False
        self._is_cancelled_here = True
        self._messages.clear()
        self._tell_server()
        self.end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
        return True

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._status is not None and not self._messages

    async def initial_metadata(self) -> Metadata:
        await self._until(lambda: self._answer is not None or self._messages or self._status is not None)
        return self._answer or ()

    async def code(self) -> grpc.StatusCode:
        await self._until(lambda: self._status is not None)
        return self._status[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        await self._until(lambda: self._status is not None)
        self._raise_for_status()
        return self._parse(self._messages.popleft()[0])

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message
        self._raise_for_status()

    async def read(self) -> Any:
        message = await self._next()
        if message is grpc.aio.EOF:
            self._raise_for_status()
        return message

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        message = self._serialize(request)
        await self._until_event(self._opened)
        if self.done() or self._connection is None:
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")
        self._send_request(message)

    async def done_writing(self) -> None:
        await self._until_event(self._opened)
        if self._connection is not None:
            self._send_request(None)

    def _send_request(self, message: bytes | None) -> None:
        served, call_id = self._connection.served, self.call_id
        self._connection.up.send(lambda: call_id in served and served[call_id].add_request(message))

    async def _next(self) -> Any:
        await self._until(lambda: self._messages or self._status is not None)
        if not self._messages:
            return grpc.aio.EOF
        message, sender = self._messages.popleft()
        sender.note_read()
        return self._parse(message)

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self._changed.clear()
            await self._until_event(self._changed)

    async def _until_event(self, event: asyncio.Event) -> None:
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        if self._is_cancelled_here:
            raise asyncio.CancelledError
        code, details, trailing = self._status
        if code is not OK:
            metadata = grpc.aio.Metadata.from_tuple(tuple(trailing))
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
