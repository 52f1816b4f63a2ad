"""Servers of gRPC. A ServingError leaves a handler as a status.

    server = make_server()                     # its servicers raise ServingErrors and know no statuses
    health = add_standard_services(server, ["octavo.v1.Inference"])

octavo.wire.statuses says how an error crosses the connection.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.net.health import Health
from octavo.net.reflection import add_reflection
from octavo.net.security.authorizer import Authorizer
from octavo.net.security.listener_tls import ListenerTls
from octavo.process import telemetry
from octavo.process.listen_address import ListenError, why_not_listening
from octavo.request import errors, limits
from octavo.request.errors import ServingError
from octavo.wire.channel import Options, header_options, keepalive_options, message_options
from octavo.wire.endpoint import parse_listener
from octavo.wire.statuses import status_of
from octavo.wire.text_fields import find_bad_text

PUSHBACK = "grpc-retry-pushback-ms"
# A caller by grpc.aio that still sends when its call ends loses the status, and reports an INTERNAL of its own.
HEARING_S = 2.0  # how long a refused call is heard out, until its requests end
HEARD_REQUESTS = 64  # of such a call at most
SETTLING_S = 0.02  # how long after its last request the caller may still be busy with having sent it
# A server need not hurry: what it loses is a caller that comes back, and leases tell which processes are gone.
PING_MS = 10_000
PATIENCE_MS = 20_000
AGE_GRACE_MS = 600_000  # how long calls under way have on a connection of the highest age
HANDSHAKE_MS = 20_000  # how long a connection may take to say that it speaks HTTP/2, and TLS before that

_log = logging.getLogger(__name__)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """Ends a call with the status of `error`."""
    status = rpc_status.to_status(status_of(error))
    trailer = status.trailing_metadata
    if error.retry_after_ms:  # RetryInfo in the form that the retries of gRPC libraries understand
        trailer = (*trailer, (PUSHBACK, str(error.retry_after_ms)))
    await context.abort(status.code, status.details, trailer)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses.

    A ServingError becomes the status of its class. Cancellation and aborts pass unchanged. Any other exception becomes
    INTERNAL with an id; the log has the stack under this id, but neither the request nor the exception's text. A unary
    request that cannot be parsed (a `string` that is not UTF-8) becomes INVALID_ARGUMENT instead of gRPC's INTERNAL.
    An authorizer is asked before a request is parsed. A call that streams its requests and ends without a reply is
    told why when its requests have ended, or after HEARING_S.
    """

    def __init__(self, authorizer: Authorizer | None = None) -> None:
        self._authorizer = authorizer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _wrapped(handler, handler_call_details.method, self._authorizer)


def _wrapped(handler: Any, method: str, authorizer: Authorizer | None) -> Any:
    name = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, name)
    parse = None if handler.request_streaming else handler.request_deserializer
    if isasyncgenfunction(behaviour):
        guarded = _guarded_generator
    elif iscoroutinefunction(behaviour):
        guarded = _guarded_coroutine
    elif authorizer is None:  # a blocking handler, which gRPC runs in a thread; octavo has none
        return handler
    else:
        raise TypeError(f"{method} blocks: nothing would ask who calls it")

    def admit(request: Any, context: Any) -> Any:
        """The request, parsed, of a call that is let in. Raises ServingError."""
        if authorizer is None:
            return _parsed(parse, request)
        authorizer.authorize_call(method, context)
        request = _parsed(parse, request)
        authorizer.note_call(method, context, request)
        return request

    make = getattr(grpc, f"{name}_rpc_method_handler")
    deserializer = None if parse else handler.request_deserializer
    return make(
        guarded(behaviour, admit, method, streams=parse is None),
        request_deserializer=deserializer,
        response_serializer=handler.response_serializer,
    )


def _guarded_coroutine(behaviour: Any, admit: Callable[[Any, Any], Any], method: str, *, streams: bool) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(admit(request, context), context)
        except Exception as error:
            if streams:
                await _hear_out(request)
            await _end(context, method, error)

    return guarded


def _guarded_generator(behaviour: Any, admit: Callable[[Any, Any], Any], method: str, *, streams: bool) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        replied = False
        try:
            async with aclosing(behaviour(admit(request, context), context)) as replies:
                async for reply in replies:
                    replied = True
                    yield reply
        except Exception as error:
            if streams and not replied:
                await _hear_out(request)
            await _end(context, method, error)

    return guarded


async def _hear_out(requests: AsyncIterator[Any]) -> None:
    """Reads the rest of what a caller sends, until the caller has ended its side."""
    with suppress(Exception):  # a request that cannot be parsed, or a reader of the handler's that has not ended
        async with asyncio.timeout(HEARING_S):
            reader = aiter(requests)
            for _ in range(HEARD_REQUESTS):
                await anext(reader)
    await asyncio.sleep(SETTLING_S)


def _parsed(parse: Callable[[bytes], Any] | None, request: Any) -> Any:
    if parse is None:
        return request
    try:
        return parse(request)
    except DecodeError:
        message_class = getattr(parse, "__self__", None)  # `parse` is FromString of a message class
        bad = find_bad_text(message_class.DESCRIPTOR, request) if message_class else None
    if bad is None:
        raise errors.InvalidArgument("request", "cannot be parsed; was it made from another schema?")
    raise errors.InvalidArgument(bad.field, bad.description)


async def _end(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, ServingError):
        error_id = secrets.token_hex(4)
        _log.error("internal error %s in %s\n%s", error_id, method, telemetry.stack_of(error))
        error = ServingError(f"internal error {error_id}; the server's log says more under this id", id=error_id)
    await abort(context, error)


def make_server(
    *,
    internal: bool = False,
    authorizer: Authorizer | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_concurrent_rpcs: int | None = None,
    max_connection_age_ms: int | None = None,
    max_connections: int | None = None,
) -> grpc.aio.Server:
    """A server whose handlers raise ServingErrors. An `internal` one is for connections between routers and workers.

    Of more than `max_connections`, further ones are closed at once. The `authorizer` is asked before every call.
    Without one, whoever connects may call everything.
    """
    options: Options = [
        *message_options(internal),
        *keepalive_options(PING_MS, PATIENCE_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),  # a stalled peer's pings arrive in a bunch
        ("grpc.max_concurrent_streams", 256),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # a few kB could be unpacked to gigabytes
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *header_options(limits.MAX_METADATA_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", 1),
    ]
    if max_connection_age_ms is not None:
        options += [
            ("grpc.max_connection_age_ms", max_connection_age_ms),
            ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
        ]
    if max_connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    chain = [*interceptors, ErrorInterceptor(authorizer)]
    return grpc.aio.server(interceptors=chain, options=options, maximum_concurrent_rpcs=max_concurrent_rpcs)


def open_port(
    server: grpc.aio.Server, address: str, tls: ListenerTls | None = None, *, ask_callers: bool = True
) -> int:
    """Listens on HOST:PORT and returns the port, which is another one for port 0. With `tls`, for TLS alone.

    With `ask_callers`, callers need a certificate. Raises RuntimeError if the address cannot be listened on.
    """
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.server_credentials(ask_callers=ask_callers))


def add_standard_services(server: grpc.aio.Server, service_names: Iterable[str]) -> Health:
    """Adds health, reflection and channelz. Call it before the server starts. All services begin as NOT_SERVING."""
    names = list(service_names)
    health = Health(names)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    channelz.add_channelz_servicer(server)
    standard = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, "grpc.channelz.v1.Channelz"]
    add_reflection(server, [*names, *standard])
    return health


def listen(
    server: grpc.aio.Server, address: str, flag: str, tls: ListenerTls | None = None, *, ask_callers: bool = True
) -> str:
    """Listens on HOST:PORT, which came from a flag. Returns it with the port chosen for port 0. Raises ListenError."""
    try:
        port = open_port(server, address, tls, ask_callers=ask_callers)
        return str(replace(parse_listener(address), port=port))
    except RuntimeError:
        raise ListenError(why_not_listening(address, flag)) from None
