"""What takes the place of grpc.aio.server: the handlers and interceptors are the real ones, the connections are not."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from simulation.connection import Connection

if TYPE_CHECKING:
    from simulation.transport import Transport

WINDOW = 64  # messages that a reader has not read yet, after which a writer waits
Metadata = Sequence[tuple[str, Any]]


class SimServer:
    """Belongs to the host that makes it."""

    def __init__(self, transport: "Transport", interceptors: Sequence[Any], options: Sequence[tuple[str, Any]]) -> None:
        self.transport = transport
        self.host = transport.calling_host()
        self.options = dict(options)
        self.connections: list[Connection] = []
        self._interceptors = list(interceptors)
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._addresses: list[str] = []
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """The generic handlers have the same methods."""

    def add_insecure_port(self, address: str) -> int:
        if address in self.transport.listeners:
            raise RuntimeError(f"{address} is taken")
        self._addresses.append(address)
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        for address in self._addresses:
            self.transport.listeners[address] = self
        self.host.on_death.append(self._close_ports)

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls at once, and cancels those that have not ended after `grace`."""
        self._close_ports()
        for connection in self.connections:
            connection.going_away = True
        going = [call.task for connection in self.connections for call in connection.served.values() if call.task]
        if going and grace:
            await asyncio.wait(going, timeout=grace)
        for connection in self.connections:
            connection.break_server()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        await self._stopped.wait()
        return True

    def _close_ports(self) -> None:
        for address in self._addresses:
            if self.transport.listeners.get(address) is self:
                del self.transport.listeners[address]

    async def find_handler(self, method: str) -> Any:
        """The method's handler, as the interceptors make it; None if there is none."""
        if method not in self._handlers:
            self._handlers[method] = await self._intercepted(
                SimpleNamespace(method=method, invocation_metadata=()), self._interceptors
            )
        return self._handlers[method]

    async def _intercepted(self, details: Any, interceptors: Sequence[Any]) -> Any:
        if interceptors:

            async def further(details: Any) -> Any:
                return await self._intercepted(details, interceptors[1:])

            return await interceptors[0].intercept_service(further, details)
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


class ServerCall:
    """One call at its server. It is the context that the handler gets."""

    def __init__(
        self, connection: Connection, call_id: int, method: str, timeout_s: float | None, *, silent: bool = False
    ) -> None:
        self.connection = connection
        self.call_id = call_id
        self.method = method
        self.num_unread = 0  # messages that the client has not read
        self._silent = silent  # a copy of a call: nobody hears its answers
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._timer = None if timeout_s is None else self._loop.call_later(timeout_s, self.cancel)
        self._requests: deque[bytes | None] = deque()  # None: the client sends no more
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._status: tuple[grpc.StatusCode, str, Metadata] | None = None
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self.task = asyncio.create_task(self._run())

    # From the client

    def add_request(self, request: bytes | None) -> None:
        self._requests.append(request)
        self._changed.set()

    def note_read(self) -> None:
        self.num_unread -= 1
        self._room.set()

    def cancel(self) -> None:
        """The client has gone, or the deadline has passed."""
        if self.task is not None:
            self.task.cancel()

    # The context

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def invocation_metadata(self) -> Metadata:
        return ()

    def peer(self) -> str:
        return f"ipv4:{self.connection.client.name}"

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        if not self._silent:
            calls, call_id = self.connection.calls, self.call_id
            self.connection.down.send(lambda: call_id in calls and calls[call_id].note_answer(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        self._status = (code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    # The handler

    async def _run(self) -> None:
        try:
            handler = await self.connection.server.find_handler(self.method)
            if handler is None:
                self._status = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ())
            else:
                await self._answer(handler)
            status = self._status or (grpc.StatusCode.OK, "", ())
        except grpc.aio.AbortError:
            status = self._status or (grpc.StatusCode.UNKNOWN, "", ())
        except asyncio.CancelledError:
            status = (grpc.StatusCode.CANCELLED, "CANCELLED", ())
        except Exception as error:
            status = (grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}", ())
        if self._timer is not None:
            self._timer.cancel()
        self.connection.served.pop(self.call_id, None)
        self._send_status(status)

    async def _answer(self, handler: Any) -> None:
        kinds = (handler.request_streaming, handler.response_streaming)
        name = "_".join("stream" if streams else "unary" for streams in kinds)
        behaviour, parse = getattr(handler, name), handler.request_deserializer
        request: Any = self._iterate(parse) if handler.request_streaming else await self._next_request(parse)
        if handler.response_streaming:
            async for reply in behaviour(request, self):
                await self._send(handler.response_serializer(reply))
        else:
            await self._send(handler.response_serializer(await behaviour(request, self)))

    async def _next_request(self, parse: Any) -> Any:
        while not self._requests:
            self._changed.clear()
            await self._changed.wait()
        request = self._requests.popleft()
        return request if request is None or parse is None else parse(request)

    async def _iterate(self, parse: Any) -> AsyncIterator[Any]:
        while (request := await self._next_request(parse)) is not None:
            yield request

    async def _send(self, message: bytes) -> None:
        if self._silent:
            return
        while self.num_unread >= WINDOW:
            self._room.clear()
            await self._room.wait()
        self.num_unread += 1
        calls, call_id = self.connection.calls, self.call_id
        self.connection.down.send(lambda: call_id in calls and calls[call_id].add_message(message, self))

    def _send_status(self, status: tuple[grpc.StatusCode, str, Metadata]) -> None:
        self.connection.server.transport.note_answer(self, status[0])
        if not self._silent and self.connection.server_open:
            calls, call_id = self.connection.calls, self.call_id
            self.connection.down.send(lambda: call_id in calls and calls.pop(call_id).end(*status))
