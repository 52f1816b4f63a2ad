"""The store as a host of its own: a MemoryState, and what each router and worker has to reach it."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.store.calls import MigrateReply, Notice, TakeReply
from octavo.store.memory import MemoryState, MemoryStore
from simulation.clock import wall_clock_s
from simulation.event_log import EventLog
from simulation.loop import Host
from simulation.network import Network, Pipe
from simulation.store_monitor import StoreMonitor

CALL_TIMEOUT_S = 2.0
LIFELINE_S = 0.1  # how often a lifeline may break or come back
# Not in the log, unless they fail.
QUIET = ("heartbeat", "note_limits", "queue_depth", "model_depths", "members", "sweep", "owned", "read")
NOT_SHARED = ("subscribers", "now_ms")  # parts of a MemoryState that a replica does not have


class StoreServer:
    """The data, and the faults of the server that holds them.

    Shares of calls: `lost_requests` are not executed, `lost_replies` are executed and not answered, `late` ones are
    executed after their caller has given up, `twice` are executed again after a pause.
    """

    def __init__(self, network: Network, log: EventLog, host: Host) -> None:
        self.network = network
        self.log = log
        self.host = host
        self.state = MemoryState(lambda: int(wall_clock_s(host.loop, host) * 1000))
        self.down = False
        self.heal_calls()
        self.monitor = StoreMonitor(self.state)
        self._replica: dict[str, Any] | None = None
        self._number = 0

    def client(self, host: Host, on_generation: Callable[[int], None] | None = None) -> "SimStore":
        self._number += 1
        return SimStore(self, host, on_generation, self._number)

    def note_call(self, name: str, caller: Host, args: Sequence[Any], outcome: Any) -> None:
        """A function has been executed."""
        if name == "append_batch" and isinstance(outcome, list):
            writer = caller.program.listener.incarnation if caller.program is not None else None
            self.monitor.note_append(writer, args[-1], outcome)
        elif name == "take_ownership" and isinstance(outcome, TakeReply):
            self.monitor.note_take(args[0], outcome.status)
        elif name == "mig_commit" and isinstance(outcome, MigrateReply):
            seq_id, epoch, _, target, _ = args
            self.monitor.note_commit(seq_id, epoch, target, outcome.status)

    # Faults

    def heal_calls(self) -> None:
        self.lost_requests = self.lost_replies = self.late = self.twice = 0.0

    def come_back(self) -> None:
        """The server has restarted, with all its data."""
        self.down = False
        self.state.restart()

    def stop_replication(self) -> None:
        """What is written from now on does not reach the replica."""
        self._replica = self._copy()

    def fail_over(self) -> None:
        """The replica becomes the primary: what was written since `stop_replication` is lost."""
        if self._replica is not None:
            for name, value in self._replica.items():
                setattr(self.state, name, value)
            self._replica = None
        self.monitor.forget()
        self.state.restart()

    def _copy(self) -> dict[str, Any]:
        return copy.deepcopy({name: value for name, value in vars(self.state).items() if name not in NOT_SHARED})


class SimStore:
    """The Store of one host. Every method is a call over the network; the functions are those of MemoryStore."""

    def __init__(
        self, server: StoreServer, host: Host, on_generation: Callable[[int], None] | None, number: int
    ) -> None:
        self._server = server
        self._host = host
        self._memory = MemoryStore(server.state)
        self._on_generation = on_generation
        self._rng = server.network.rng(f"store client {number}")
        self.generation = self._memory.generation

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._memory, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, args, lambda: function(*args, **kwargs))

        return call

    async def close(self) -> None:
        pass

    async def _call(self, name: str, args: Sequence[Any], function: Callable[[], Any]) -> Any:
        """What the function returns. Raises StoreUnavailable when no answer comes in time."""
        server, loop, rng = self._server, asyncio.get_running_loop(), self._rng
        log, drawn = server.log, rng.random()
        reply: asyncio.Future[Any] = loop.create_future()
        dies = self._dies_in_this_call(name)

        def execute(*, answered: bool = True) -> None:
            if dies:
                log.count("killed in a call", f"{self._host} {name}")
                self._host.die(137)
                if rng.random() < 0.3:
                    return  # the request did not arrive
            if server.down:
                outcome = StoreUnavailable("Connection refused")
            else:
                outcome = run(function)
                server.note_call(name, self._host, args, outcome)
            if answered:
                Pipe(server.network, server.host, self._host, rng).send(lambda: settle(reply, outcome))

        def send(delay_s: float = 0.0, *, answered: bool = True) -> None:
            pipe, arrive = Pipe(server.network, self._host, server.host, rng), partial(execute, answered=answered)
            if delay_s:
                loop.call_later(delay_s, pipe.send, arrive, context=server.host.context)
            else:
                pipe.send(arrive)

        if drawn < (bound := server.lost_requests):
            log.count("lost request", f"{self._host} {name}")
            await asyncio.sleep(rng.choice([0.001, CALL_TIMEOUT_S]))
            raise StoreUnavailable("the request was lost")
        if drawn < (bound := bound + server.lost_replies):
            log.count("lost reply", f"{self._host} {name}")
            send(answered=False)
            await asyncio.sleep(rng.choice([0.002, CALL_TIMEOUT_S]))
            if rng.random() < 0.5:
                raise StoreUnavailable("the reply was lost")
            send()  # as the client library repeats a call whose connection broke
        elif drawn < (bound := bound + server.late):
            log.count("late request", f"{self._host} {name}")
            send(rng.uniform(CALL_TIMEOUT_S, 2 * CALL_TIMEOUT_S), answered=False)
            await asyncio.sleep(CALL_TIMEOUT_S)
            raise StoreUnavailable("Timeout reading")
        else:
            send()
            if drawn < bound + server.twice:
                log.count("repeated request", f"{self._host} {name}")
                send(rng.uniform(0.001, 0.5), answered=False)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                outcome = await reply
        except TimeoutError:
            log.add(str(self._host), f"store.{name}: timed out")
            raise StoreUnavailable("Timeout reading") from None
        if name not in QUIET or isinstance(outcome, Exception):
            log.add(str(self._host), f"store.{name}: {brief(outcome)}")
        if isinstance(outcome, Exception):
            raise outcome
        if self._memory.generation != self.generation:
            self.generation = self._memory.generation
            if self._on_generation is not None:
                self._on_generation(self.generation)
        return outcome

    def _dies_in_this_call(self, name: str) -> bool:
        host = self._host
        if host.calls_left is None or name in QUIET:
            return False
        host.calls_left -= 1
        return host.calls_left == 0

    async def hold_lifeline(self, worker: Incarnation, on_held: Callable[[], None]) -> None:
        """Breaks with the process, if its machine lives; with the network; and now and then without a reason."""
        server, host = self._server, self._host

        def end() -> None:
            if not host.vanished:
                server.state.lifelines.discard(worker)

        host.on_death.append(end)
        while True:
            up = not server.down and server.network.reaches(host.name, server.host.name) and self._rng.random() > 0.01
            if up and worker not in server.state.lifelines:
                server.state.lifelines.add(worker)
                on_held()
            elif not up:
                server.state.lifelines.discard(worker)
            await asyncio.sleep(LIFELINE_S)

    async def notices(self, router: Incarnation) -> AsyncIterator[Notice]:
        """Notices come late, and are lost while the store cannot reach the router."""
        server = self._server
        async with aclosing(self._memory.notices(router)) as notices:
            async for notice in notices:
                await asyncio.sleep(server.network.delay_s(server.host.name, self._host.name, self._rng))
                if not server.down and server.network.reaches(server.host.name, self._host.name):
                    yield notice


def run(function: Callable[[], Any]) -> Any:
    """The outcome of a function of MemoryStore, which awaits nothing: what it returns, or the exception it raises."""
    work = function()
    try:
        work.send(None)
    except StopIteration as stopped:
        return stopped.value
    except Exception as error:
        return error
    raise RuntimeError("a function of MemoryStore has waited")


def settle(reply: "asyncio.Future[Any]", outcome: Any) -> None:
    if not reply.done():
        reply.set_result(outcome)


def brief(outcome: Any) -> str:
    text = repr(outcome)
    return text if len(text) < 160 else f"{text[:157]}..."
