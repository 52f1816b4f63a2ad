"""Servers and channels of gRPC. A ServingError leaves a handler as a status, and comes out of a call as itself again.

    server = rpc.server()                      # its servicers raise ServingErrors and know no statuses
    health = rpc.add_standard_services(server, ["octavo.v1.Inference"])

    async with rpc.channel(endpoint) as channel:
        with statuses.serving_errors():        # calls raise ServingErrors, too
            await stub.Complete(request)

octavo.statuses says how an error crosses the connection.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo import errors, limits, telemetry
from octavo.errors import ServingError
from octavo.health import Health
from octavo.reflection import add_reflection
from octavo.security.authorizer import KEY_HEADER, Authorizer
from octavo.security.client_credentials import PLAIN, ClientCredentials
from octavo.security.renewed_channel import RenewedChannel
from octavo.security.roles import WORKER_NAME
from octavo.security.tls import TlsFiles
from octavo.statuses import status_of
from octavo.text_fields import find_bad_text

PUSHBACK = "grpc-retry-pushback-ms"
# A caller leaves a peer that hangs within PING_MS + PATIENCE_MS, whether data flow or not. gRPC's own threads answer
# pings, so a busy interpreter delays none: 0 of 24 connections were lost in 10 minutes beside six busy processes.
PING_MS = 1_000
PATIENCE_MS = 2_000
# A server need not hurry: what it loses is a caller that comes back, and leases tell which processes are gone.
SERVER_PING_MS = 10_000
SERVER_PATIENCE_MS = 20_000
# A caller by grpc.aio that still sends when its call ends loses the status, and reports an INTERNAL of its own.
HEARING_S = 2.0  # how long a refused call is heard out, until its requests end
HEARD_REQUESTS = 64  # of such a call at most
SETTLING_S = 0.02  # how long after its last request the caller may still be busy with having sent it
HANDSHAKE_MS = 20_000  # how long a connection may take to say that it speaks HTTP/2, and TLS before that

_log = logging.getLogger(__name__)

Options = list[tuple[str, Any]]


# The server's side


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
        behaviour = _guarded_generator(behaviour, method, parse, authorizer)
    elif iscoroutinefunction(behaviour):
        behaviour = _guarded_coroutine(behaviour, method, parse, authorizer)
    elif authorizer is None:  # a blocking handler, which gRPC runs in a thread; octavo has none
        return handler
    else:
        raise TypeError(f"{method} blocks: nothing would ask who calls it")
    make = getattr(grpc, f"{name}_rpc_method_handler")
    deserializer = None if parse else handler.request_deserializer
    return make(behaviour, request_deserializer=deserializer, response_serializer=handler.response_serializer)


def _guarded_coroutine(
    behaviour: Callable[..., Awaitable[Any]], method: str, parse: Any, authorizer: Authorizer | None
) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if authorizer is not None:
                authorizer.authorize_call(method, context)
            request = _parsed(parse, request)
            if authorizer is not None:
                authorizer.note_call(method, context, request)
            return await behaviour(request, context)
        except Exception as error:
            if parse is None:
                await _hear_out(request)
            await _end(context, method, error)

    return guarded


def _guarded_generator(behaviour: Callable[..., Any], method: str, parse: Any, authorizer: Authorizer | None) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        replied = False
        try:
            if authorizer is not None:
                authorizer.authorize_call(method, context)
            request = _parsed(parse, request)
            if authorizer is not None:
                authorizer.note_call(method, context, request)
            async with aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    replied = True
                    yield reply
        except Exception as error:
            if parse is None and not replied:
                await _hear_out(request)
            await _end(context, method, error)

    return guarded


async def _hear_out(requests: AsyncIterator[Any]) -> None:
    """Reads what a caller still sends, until it says that this was all."""
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


def server(
    *,
    internal: bool = False,
    authorizer: Authorizer | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_concurrent_rpcs: int | None = None,
    max_connection_age_ms: int | None = None,
    max_connection_age_grace_ms: int = 600_000,
    max_connections: int | None = None,
) -> grpc.aio.Server:
    """A server whose handlers raise ServingErrors. An `internal` one is for connections between routers and workers.

    Of more than `max_connections`, further ones are closed at once. The `authorizer` is asked before every call.
    Without one, whoever connects may call everything.
    """
    options: Options = [
        *_message_options(internal),
        *_keepalive_options(SERVER_PING_MS, SERVER_PATIENCE_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),  # a stalled peer's pings arrive in a bunch
        ("grpc.max_concurrent_streams", 256),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # a few kB could be unpacked to gigabytes
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        *_header_options(limits.MAX_METADATA_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", 1),
    ]
    if max_connection_age_ms is not None:
        options += [
            ("grpc.max_connection_age_ms", max_connection_age_ms),
            ("grpc.max_connection_age_grace_ms", max_connection_age_grace_ms),
        ]
    if max_connections is not None:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    chain = [*interceptors, ErrorInterceptor(authorizer)]
    return grpc.aio.server(interceptors=chain, options=options, maximum_concurrent_rpcs=max_concurrent_rpcs)


def open_port(server: grpc.aio.Server, address: str, tls: TlsFiles | None = None, *, ask_callers: bool = True) -> int:
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


# The client's side


def channel(
    endpoint: str,
    *,
    internal: bool = False,
    credentials: ClientCredentials = PLAIN,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """A channel that notices a dead peer within 3 s and a returned one within 1 s. `options` are added to its own."""
    options = [*channel_options(internal=internal), *options]
    tls, name, api_key = credentials.tls, credentials.server_name, credentials.api_key
    if tls is None and not api_key:
        return grpc.aio.insecure_channel(endpoint, options=options)
    if tls is not None and name:
        options += [("grpc.ssl_target_name_override", name)]

    def open_channel(security: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if security is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, security, options=options)

    return RenewedChannel(open_channel, tls, [(KEY_HEADER, f"Bearer {api_key}")] if api_key else [])


def worker_channel(endpoint: str, tls: TlsFiles | None = None, *, unread_bytes: int | None = None) -> grpc.aio.Channel:
    """A channel to a worker, for routers and other workers. With `tls`, the peer must have a worker's certificate.

    With `unread_bytes`, a call's messages wait in the worker while so much is unread here. Without, gRPC lets
    megabytes be on their way where the network is fast.
    """
    options = []
    if unread_bytes is not None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", unread_bytes)]
    return channel(endpoint, internal=True, credentials=ClientCredentials(tls, WORKER_NAME), options=options)


def channel_options(*, internal: bool = False) -> Options:
    """The options of `channel`, for blocking ones: grpc.insecure_channel(endpoint, options=rpc.channel_options())."""
    return [
        *_message_options(internal),
        *_keepalive_options(PING_MS, PATIENCE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # bounds one attempt to connect; a refused attempt ends at once
        ("grpc.max_reconnect_backoff_ms", 1_000),
        *_header_options(2 * limits.MAX_METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),  # an http_proxy variable is meant for the web, and would capture 127.0.0.1 too
    ]


def _message_options(internal: bool) -> Options:
    size = limits.MAX_INTERNAL_MESSAGE_BYTES if internal else limits.MAX_MESSAGE_BYTES
    return [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]


def _header_options(most: int) -> Options:
    """Without the second option, gRPC refuses headers between the limit and twice that at random."""
    return [("grpc.max_metadata_size", most), ("grpc.absolute_max_metadata_size", most)]


def _keepalive_options(interval_ms: int, timeout_ms: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What gRPC in fact waits for the answer to a ping: of keepalive, and those that measure a busy connection.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
