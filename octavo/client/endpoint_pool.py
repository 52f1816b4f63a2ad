"""The routers that a client may call, with one channel each, which is opened when it is first needed."""

import asyncio
import time
from collections.abc import Sequence
from functools import cache
from importlib import resources

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.net.channel import open_channel
from octavo.net.security.client_credentials import PLAIN, ClientCredentials
from octavo.process.endpoint import parse_targets
from octavo.request import errors
from octavo.v1 import inference_pb2_grpc
from octavo.wire import statuses

# Codes of a status without octavo's details: of a dying process, a transport or a proxy,
STRANGE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
# and what a library says itself of a call that a router was asked. Any other one is of a program that is no router.
LOCAL = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
REASON_TIMEOUT_S = 0.2
AVOID_S = 2.0  # how long an endpoint that failed comes after the others


@cache
def channel_options() -> tuple[tuple[str, str | int], ...]:
    """What protos/service_config.json says, without its retries: the SDK's own know request ids and have a budget."""
    service_config = resources.files("octavo.v1").joinpath("service_config.json").read_text(encoding="utf-8")
    return ("grpc.service_config", service_config), ("grpc.enable_retries", 0)


class EndpointPool:
    """Hands out endpoints: calls start at each in turn, and go on to the next one when an endpoint fails.

    A pool belongs to one event loop.
    """

    def __init__(self, endpoints: str | Sequence[str], credentials: ClientCredentials = PLAIN) -> None:
        """Raises InvalidArgument if one of the endpoints is none."""
        try:
            self.names = parse_targets(endpoints)
        except ValueError as error:
            raise errors.InvalidArgument("endpoints", str(error)) from None
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._failed_at: dict[str, float] = {}
        self._foreign: set[str] = set()  # endpoints whose last answer was that of another program
        self._turn = 0

    def first(self) -> str:
        """The endpoint of a new call."""
        name = self._best(self._turn)
        self._turn += 1
        return name

    def after(self, failed: str) -> str:
        """The endpoint on which a call goes on after it has failed on `failed`."""
        self._failed_at[failed] = time.monotonic()
        return self._best(self.names.index(failed) + 1)

    def _best(self, turn: int) -> str:
        in_turn = [self.names[(turn + offset) % len(self.names)] for offset in range(len(self.names))]
        now = time.monotonic()
        return next((name for name in in_turn if now - self._failed_at.get(name, -AVOID_S) >= AVOID_S), in_turn[0])

    def error_of(self, name: str, failed: grpc.RpcError) -> errors.ServingError:
        """The error of a call that has failed on the endpoint `name`.

        An endpoint at which another program than a router answers is Unreachable, so the call goes on at the next
        endpoint. If no endpoint is a router, trying again does not help: the error is then made of the status, and
        names the endpoints.
        """
        if not _is_foreign(failed):
            self._foreign.discard(name)
            error = typed(failed)
            if isinstance(error, errors.Unreachable) and name not in error.message:
                return errors.Unreachable(f"{name}: {error.message}")
            return error
        self._foreign.add(name)
        said = statuses.error_from(failed)
        what = said.message if isinstance(said, errors.Unimplemented) else f"this is no router's answer: {said.message}"
        if self._foreign.issuperset(self.names):
            return type(said).restore(f"{', '.join(self.names)}: {what}")
        return errors.Unreachable(f"{name}: {what}")

    def stub(self, name: str) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self._channel(name))

    def _channel(self, name: str) -> grpc.aio.Channel:
        if name not in self._channels:
            self._channels[name] = open_channel(name, credentials=self._credentials, options=channel_options())
        return self._channels[name]

    async def connect(self, timeout_s: float) -> None:
        """Returns once one of the endpoints is connected. Raises Unreachable, with a reason."""
        tries = [asyncio.ensure_future(self._channel(name).channel_ready()) for name in self.names]
        try:
            connected, _ = await asyncio.wait(tries, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for attempt in tries:
                attempt.cancel()
            await asyncio.gather(*tries, return_exceptions=True)
        if not connected:
            reason = await self._reason(self.names[0])
            names = ", ".join(self.names)
            raise errors.Unreachable(f"{names}: not connected within {timeout_s:g} s{f' ({reason})' if reason else ''}")

    async def _reason(self, name: str) -> str:
        """What gRPC says of an endpoint that it cannot connect to; empty if it waits for an answer."""
        try:
            health = health_pb2_grpc.HealthStub(self._channel(name))  # gRPC repeats no call of this service by itself
            await health.Check(health_pb2.HealthCheckRequest(), timeout=REASON_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return (error.details() or "").rpartition("last error: ")[2].removeprefix("UNKNOWN: ").strip()
        return ""

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


def typed(error: grpc.RpcError) -> errors.ServingError:
    """The error of a failed call.

    Every status that octavo sends has details. A status without them comes from a dying process, a transport or a
    proxy: if its code is in STRANGE, the error is Unreachable.
    """
    strange = isinstance(error, grpc.aio.AioRpcError) and error.code() in STRANGE
    if strange and not statuses.is_of_octavo(error):
        return errors.Unreachable(error.details() or error.code().name)
    return statuses.error_from(error)


def _is_foreign(error: grpc.RpcError) -> bool:
    known = (*STRANGE, *LOCAL)
    return isinstance(error, grpc.aio.AioRpcError) and error.code() not in known and not statuses.is_of_octavo(error)
