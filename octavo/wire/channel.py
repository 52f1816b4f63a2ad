"""Channels of gRPC. A status comes out of a call as the ServingError that it was.

async with open_channel(endpoint) as channel:
    with statuses.serving_errors():
        await stub.Complete(request)

A channel of gRPC keeps the certificate that it was made with, also for the connections that it makes years later. A
RenewedChannel makes another one when the files have changed. Calls under way stay on theirs, which is closed after the
last.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from octavo.request import limits
from octavo.wire.tls import PLAIN, WORKER_NAME, ClientCredentials, TlsFiles, TlsMaterial

KEY_HEADER = "authorization"  # has a caller's API key
# A caller leaves a peer that hangs within PING_MS + PATIENCE_MS, whether data flow or not. gRPC's own threads answer
# pings, so a busy interpreter delays none: 0 of 24 connections were lost in 10 minutes beside six busy processes.
PING_MS = 1_000
PATIENCE_MS = 2_000

Options = list[tuple[str, Any]]
OpenChannel = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]
Metadata = Sequence[tuple[str, str]]


def open_channel(
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

    def connect(security: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if security is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, security, options=options)

    return RenewedChannel(connect, tls, [(KEY_HEADER, f"Bearer {api_key}")] if api_key else [])


def open_worker_channel(
    endpoint: str, tls: TlsFiles | None = None, *, unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to a worker, for routers and other workers. With `tls`, the peer must have a worker's certificate.

    With `unread_bytes`, a call's messages wait in the worker while so much is unread here. Without, gRPC lets
    megabytes be on their way where the network is fast.
    """
    options = []
    if unread_bytes is not None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", unread_bytes)]
    return open_channel(endpoint, internal=True, credentials=ClientCredentials(tls, WORKER_NAME), options=options)


def channel_options(*, internal: bool = False) -> Options:
    """The options of `open_channel`, for blocking ones: grpc.insecure_channel(endpoint, options=channel_options())."""
    return [
        *message_options(internal),
        *keepalive_options(PING_MS, PATIENCE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # bounds one attempt to connect; a refused attempt ends at once
        ("grpc.max_reconnect_backoff_ms", 1_000),
        *header_options(2 * limits.MAX_METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),  # an http_proxy variable is meant for the web, and would capture 127.0.0.1 too
    ]


def message_options(internal: bool) -> Options:
    size = limits.MAX_INTERNAL_MESSAGE_BYTES if internal else limits.MAX_MESSAGE_BYTES
    return [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]


def header_options(most: int) -> Options:
    """Without the second option, gRPC refuses headers between the limit and twice that at random."""
    return [("grpc.max_metadata_size", most), ("grpc.absolute_max_metadata_size", most)]


def keepalive_options(interval_ms: int, timeout_ms: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What gRPC in fact waits for the answer to a ping: of keepalive, and those that measure a busy connection.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class RenewedChannel(grpc.aio.Channel):
    """A channel to one endpoint. `metadata` goes with every call."""

    def __init__(self, open_channel: OpenChannel, tls: TlsFiles | None, metadata: Metadata = ()) -> None:
        self._open_channel = open_channel
        self._tls = tls
        self.metadata = metadata
        self._material: TlsMaterial | None = None
        self._channel: grpc.aio.Channel | None = None
        self._num_calls: dict[grpc.aio.Channel, int] = {}  # of each channel that is not closed
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """The channel for a call that begins now."""
        material = self._tls.current() if self._tls else None
        if self._channel is None or material is not self._material:
            replaced, self._material = self._channel, material
            self._channel = self._open_channel(_credentials(material) if material else None)
            self._num_calls[self._channel] = 0
            if replaced is not None:
                self._close_unused(replaced)
        return self._channel

    def note_call(self, channel: grpc.aio.Channel, call: Any) -> None:
        """Keeps the channel open until the call has ended."""
        self._num_calls[channel] += 1

        def note_end(_: Any) -> None:
            if channel in self._num_calls:
                self._num_calls[channel] -= 1
                if channel is not self._channel:
                    self._close_unused(channel)

        call.add_done_callback(note_end)

    def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if not self._num_calls[channel]:
            del self._num_calls[channel]
            closing = asyncio.get_running_loop().create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    # What grpc.aio.Channel promises

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return RenewedMethod(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return RenewedMethod(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return RenewedMethod(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return RenewedMethod(self, "stream_stream", args, options)

    async def close(self, grace: float | None = None) -> None:
        """Closes all channels that were made. Calls under way have `grace` seconds."""
        channels, self._channel = list(self._num_calls), None
        self._num_calls.clear()
        await asyncio.gather(*(channel.close(grace) for channel in channels), *self._closing)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RenewedMethod:
    """One method of a stub: each call goes to the channel of that moment."""

    def __init__(self, channel: RenewedChannel, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._options = options
        self._of: grpc.aio.Channel | None = None  # the channel that `_callable` belongs to
        self._callable: Any = None

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        channel = self._channel.current()
        if channel is not self._of:
            self._of, self._callable = channel, getattr(channel, self._kind)(*self._arguments, **self._options)
        call = self._callable(*args, metadata=(*(metadata or ()), *self._channel.metadata), **options)
        self._channel.note_call(channel, call)
        return call


def _credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=material.ca or None,
        private_key=material.key or None,
        certificate_chain=material.cert or None,
    )
