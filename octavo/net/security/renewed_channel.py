"""A gRPC channel whose calls use the certificates that are in the files now, and that says who calls.

A channel of gRPC keeps the certificate that it was made with, also for the connections that it makes years later. This
one makes another channel when the files have changed. Calls under way stay on theirs, which is closed after the last.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from octavo.net.security.tls import TlsFiles, TlsMaterial

OpenChannel = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]
Metadata = Sequence[tuple[str, str]]


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
