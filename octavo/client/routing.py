"""Which router a call goes to, when it is tried again on another one, and when it is given up.

The routers make up one cell or several. A request belongs to one of the cells, by its id. Each router has one channel,
which is opened when it is first needed.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client.receiver import BrokenStreamError
from octavo.request import errors
from octavo.request.ids import cell_number
from octavo.v1 import inference_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.endpoint import Endpoints, parse_cells
from octavo.wire.tls import PLAIN, ClientCredentials

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

    def __init__(self, names: Sequence[str], credentials: ClientCredentials = PLAIN) -> None:
        self.names = names
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

        Where no router answers, but another program, the endpoint is Unreachable, so that the call goes on at the next
        one. If that is so of all endpoints, no further try helps: the error is that of the status, and names them.
        """
        if not _is_foreign(failed):
            self._foreign.discard(name)
            error = typed(failed)
            if isinstance(error, errors.Unreachable) and name not in error.message:
                return errors.Unreachable(f"{name}: {error.message}")
            return error
        said = statuses.error_from(failed)
        what = said.message if isinstance(said, errors.Unimplemented) else f"this is no router's answer: {said.message}"
        return self._foreign_error(name, type(said), what)

    def note_answer(self, name: str) -> None:
        """A router has answered there."""
        self._foreign.discard(name)

    def unreadable(self, name: str) -> errors.ServingError:
        """The same, of an answer that gRPC could not read, for which it gives None."""
        return self._foreign_error(name, errors.Unimplemented, "this is no router's answer: it cannot be read")

    def _foreign_error(self, name: str, kind: type[errors.ServingError], what: str) -> errors.ServingError:
        self._foreign.add(name)
        if self._foreign.issuperset(self.names):
            return kind.restore(f"{', '.join(self.names)}: {what}")
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


class CellPools:
    """Says which pool a call goes to. They belong to one event loop."""

    def __init__(self, endpoints: Endpoints, credentials: ClientCredentials = PLAIN) -> None:
        """Raises InvalidArgument, which names the cell, if one of the endpoints is none."""
        try:
            cells = parse_cells(endpoints)
        except ValueError as error:
            raise errors.InvalidArgument("endpoints", str(error)) from None
        self._pools = [EndpointPool(cell, credentials) for cell in cells]
        self._turn = 0

    def pool_of(self, request_id: str) -> EndpointPool:
        """The pool of the request's cell: always the same one."""
        return self._pools[cell_number(request_id, len(self._pools))]

    def pool_for_resume(self, request_id: str | None) -> EndpointPool:
        """The pool for a resume token. Raises InvalidArgument where only the request's id can tell its cell."""
        if request_id:
            return self.pool_of(request_id)
        if len(self._pools) > 1:
            raise errors.InvalidArgument(
                "request_id", "with several cells, give the request's id beside its resume token: it names the cell"
            )
        return self._pools[0]

    def next_pool(self) -> EndpointPool:
        """The pool for a call that is about no request: each cell in turn."""
        self._turn += 1
        return self._pools[self._turn % len(self._pools)]

    async def connect(self, timeout_s: float) -> None:
        """Returns once a router of any cell is connected. Raises Unreachable, which names the routers of a cell."""
        tries = [asyncio.ensure_future(pool.connect(timeout_s)) for pool in self._pools]
        try:
            for attempt in asyncio.as_completed(tries):
                try:
                    return await attempt
                except errors.Unreachable as error:
                    failed = error
            raise failed
        finally:
            for each in tries:
                each.cancel()
            await asyncio.gather(*tries, return_exceptions=True)

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()


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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a client retries and when it gives up. All times are in seconds."""

    # A call that fails for this long without an event is given up: in this time a worker loads a large model.
    progress_timeout_s: float = 300.0
    first_answer_timeout_s: float = 60.0  # the same, while no router has ever answered it: perhaps there is none
    backoff_base_s: float = 0.05
    backoff_cap_s: float = 1.0
    retry_ratio: float = 0.1  # how many retries of calls that were one too many each call adds to the budget
    min_retries: int = 3
    deadline_grace_s: float = 5.0  # time to fetch the last tokens of a request whose deadline has passed
    # Called before each new try with the error, and for how many seconds the call has been failing.
    on_retry: Callable[[errors.ServingError, float], None] | None = None


class RetryBudget:
    """How many calls that were one too many may be retried: a share of the calls made, and always a few.

    So retries never become the load that makes routers refuse calls.
    """

    def __init__(self, ratio: float = 0.1, minimum: float = 3.0) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self._left = minimum

    def deposit(self) -> None:
        """Counts a new call, which adds to the budget."""
        self._left = min(self._left + self._ratio, self._minimum + 10.0)

    def withdraw(self) -> bool:
        """Spends one retry. False if the budget has none left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def success(self) -> None:
        """Notes that a call has got through: the budget is at least at its minimum again."""
        self._left = max(self._left, self._minimum)


@dataclass(slots=True)
class Recovery:
    """Decides about one call, stream or unary: `delay_s` takes each error, and says how long to wait before a retry.

    A call that is one too many for a router (RESOURCE_EXHAUSTED) spends a retry of the client's budget, unless the
    request has been accepted already. Where somebody is missing (a router, the workers, the store), a call puts no load
    on anybody: it is tried again until the policy's time has passed.
    """

    policy: RetryPolicy
    budget: RetryBudget
    deadline: float | None = None  # on time.monotonic()
    accepted: bool = False
    _answered: bool = False
    _failures: int = 0
    _trouble_since: float | None = None

    def note_accepted(self) -> None:
        """Notes that a router has accepted the request."""
        if not self.accepted:
            self.budget.success()
        self.accepted = self._answered = True

    def progress(self) -> None:
        """Notes that an event or a reply has arrived."""
        self.note_accepted()
        self._failures = 0
        self._trouble_since = None

    def was_open_for(self, seconds: float) -> None:
        """Notes how long the broken connection was open. After a long time, `progress_timeout_s` begins anew."""
        if seconds > self.policy.progress_timeout_s / 2:
            self._trouble_since = None

    def delay_s(self, error: errors.ServingError | BrokenStreamError) -> float:
        """How long to wait before the next try. Raises the error if another try is of no use."""
        now = time.monotonic()
        if isinstance(error, BrokenStreamError):
            error = errors.Unreachable(str(error))
        self.accepted |= isinstance(error, errors.Unreachable)  # no router has refused it, so one may have accepted it
        self._answered |= not isinstance(error, errors.Unreachable)
        is_too_many = error.code is errors.Code.RESOURCE_EXHAUSTED and not self.accepted
        if not error.retryable or (is_too_many and not self.budget.withdraw()):
            raise error
        if self._trouble_since is None:
            self._trouble_since = now
        delay = self._next_delay_s() + error.retry_after_ms / 1000
        limit = self._trouble_since + self._patience_s()
        if now + delay > limit or (self.deadline is not None and now + delay > self.deadline):
            raise error
        if self.policy.on_retry is not None:
            self.policy.on_retry(error, now - self._trouble_since)
        return delay

    def _patience_s(self) -> float:
        patience_s = self.policy.progress_timeout_s
        return patience_s if self._answered else min(patience_s, self.policy.first_answer_timeout_s)

    def _next_delay_s(self) -> float:
        """A random time between 0 and a bound that doubles with each failure (full jitter)."""
        bound = min(self.policy.backoff_cap_s, self.policy.backoff_base_s * 2 ** min(self._failures, 32))
        self._failures += 1
        return random.uniform(0.0, bound)
