"""Watches one router after the other, for as long as somebody looks."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import grpc

from octavo.cli import connection
from octavo.process.command_error import CommandError
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.tls import PLAIN, ClientCredentials

RETRY_S = 1.0


class WatchError(CommandError):
    """No router lets itself be watched. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The newest view, from whom it is, and why there is no newer one."""

    view: admin_pb2.WatchClusterResponse
    endpoint: str
    trouble: str = ""  # empty: the view has just come
    age_s: float = 0.0


class ClusterReader:
    """Watches the first of the endpoints that answers. When it is lost, the others are tried, too."""

    def __init__(
        self, endpoints: Sequence[str], timeout_s: float, interval_s: float, credentials: ClientCredentials = PLAIN
    ) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._request = admin_pb2.WatchClusterRequest(interval_ms=max(1, round(interval_s * 1000)))
        self._credentials = credentials
        self._last: ClusterReading | None = None
        self._last_at = 0.0

    async def readings(self) -> AsyncGenerator[ClusterReading, None]:
        """A reading per view; while no router answers, one per second, with the last view.

        Raises WatchError if none has answered in time from the beginning.
        """
        while True:
            reason = ""
            async with aclosing(self._watch()) as views:
                try:
                    async for reading in views:
                        self._last, self._last_at = reading, time.monotonic()
                        yield reading
                except WatchError as error:
                    if self._last is None:
                        raise
                    reason = str(error)
            if self._last is not None:
                age_s = time.monotonic() - self._last_at
                yield ClusterReading(self._last.view, self._last.endpoint, reason or "the stream has ended", age_s)
            await asyncio.sleep(RETRY_S)

    async def _watch(self) -> AsyncGenerator[ClusterReading, None]:
        """The views of one router, until it is lost. Raises WatchError."""
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(endpoint, credentials=self._credentials))
                for endpoint in self._endpoints
            ]
            ready = await self._find_ready(channels)
            reasons = [f"{', '.join(self._endpoints)}: no answer within {self._timeout_s:g} s"] if not ready else []
            for index in ready:
                call = admin_pb2_grpc.AdminStub(channels[index]).WatchCluster(self._request)
                try:
                    async for view in call:
                        yield ClusterReading(view, self._endpoints[index])
                except grpc.aio.AioRpcError as error:
                    older = "; or the router is older than `octavo top`"
                    fault = connection.admin_fault(error)
                    reasons.append(f"{self._endpoints[index]}: {fault}{older if fault == connection.NO_ADMIN else ''}")
                finally:
                    call.cancel()
            if reasons:
                raise WatchError(f"{'; '.join(reasons)}{'' if ready else f': {connection.CORRECT_ADMIN}'}")

    async def _find_ready(self, channels: Sequence[grpc.aio.Channel]) -> list[int]:
        """The channels that are connected first, in the order of the endpoints; none if time has run out."""
        tasks = [asyncio.ensure_future(channel.channel_ready()) for channel in channels]
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return [index for index, task in enumerate(tasks) if task.done() and not task.exception()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
