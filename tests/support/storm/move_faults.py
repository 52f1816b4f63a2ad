"""Moves of running sequences, alone and beside what kills or disturbs those who take part, and what becomes of each."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from storm.faults import WAYS, FaultMissed, Faults, Inject
from storm.storm_cluster import StormCluster
from waiting import until

from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from octavo.wire.channel import open_channel
from octavo.wire.statuses import error_from, status_in

Result = TypeVar("Result")
WAVE = 16  # requests that are to move at once: a source moves four, and refuses the others
BESIDE_A_KILL = 4
MOVE_S = 20.0
WAIT_S = 40.0  # until something can move: other faults may have left no router, or one worker
UNDO_S = 30.0
UNANSWERED = "not answered"  # whoever was asked has died
TIMED_OUT = f"no answer within {MOVE_S:g} s"


RunningRequest = Any  # what Admin says of a request that a worker runs


class MoveFaults:
    """What `Faults` does to processes and links, while sequences move. `outcomes` counts what became of each call.

    A move that an operator asks for is no fault, but it may come at any time, beside all others.
    """

    def __init__(self, cluster: StormCluster, faults: Faults, rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._names: dict[str, str] = {}  # of workers, by their incarnations, as far as routers have told them
        self._cluster = cluster
        self._faults = faults
        self._random = rng

    def kinds(self) -> dict[str, Inject]:
        """All of them, by name."""
        workers = self._cluster.workers
        return {
            "move": lambda: patiently(partial(self.move_some, 1)),
            "move-wave": lambda: patiently(partial(self.move_some, WAVE)),
            # kill -9 of a worker from which sequences move away, or to which they move; and of the router that has
            # asked for the moves, which go on without it.
            "move-source-kill": partial(self._kill_beside, workers, partial(self._begin_moves, source=True)),
            "move-target-kill": partial(self._kill_beside, workers, partial(self._begin_moves, source=False)),
            "move-router-kill": partial(self._kill_beside, self._cluster.routers, self._begin_moves_by),
            "drain-undo": self.drain_and_undo,
            **{f"worker-worker-{way}": partial(self.disturb_blocks, way) for way in (*WAYS, "damaged")},
        }

    async def move_some(self, most: int) -> dict[str, Any]:
        """Admin.Migrate of so many running requests at once, half of them to a named worker."""
        async with self._admin() as admin:
            names = await self._worker_names(admin)
            running = await self._running(admin)
            chosen = self._some(running, most)
            calls = [self._migrate(admin, each, self._named_target(each, names)) for each in chosen]
            found = Counter(await asyncio.gather(*calls))
        if not found["moved"]:
            raise FaultMissed(f"no sequence moved: {dict(found)}")
        return {"asked": len(chosen), **found}

    async def drain_and_undo(self) -> dict[str, Any]:
        """A worker drains for a while, and has sequences again before or after it is empty."""
        async with self._faults.one_of(self._cluster.workers) as name:
            endpoint, seconds = self._cluster.endpoints[name], self._random.uniform(0.2, 5.0)
            counts, was_draining = worker_pb2.DrainResponse(), False
            async with open_channel(endpoint, internal=True) as channel:
                worker = worker_pb2_grpc.WorkerStub(channel)
                try:
                    drain = worker.Drain(worker_pb2.DrainRequest(grace_ms=60_000), timeout=MOVE_S)
                    async with asyncio.timeout(seconds):
                        async for message in drain:
                            counts, was_draining = message, True
                except (TimeoutError, grpc.aio.AioRpcError):
                    was_draining |= await self._is_draining(name)
                finally:
                    await self._undo_drain(worker)

            async def is_back() -> bool:
                return not await self._is_draining(name) and await self._cluster.serves(name)

            await until(is_back, UNDO_S)
            if not was_draining:
                raise FaultMissed(f"{name} did not drain")
            self.outcomes["moved by a drain"] += counts.num_migrated
            self.outcomes["released by a drain"] += counts.num_released
            found = {"migrated": counts.num_migrated, "released": counts.num_released, "left": counts.num_left}
            return {"victim": name, "drained_s": round(seconds, 1), **found}

    async def _is_draining(self, name: str) -> bool:
        try:
            return (await self._cluster.load(name)).draining
        except grpc.aio.AioRpcError:  # it begins to run, and loads its model
            return False

    async def disturb_blocks(self, way: str) -> dict[str, Any]:
        """The way of blocks to a worker is a bad network, while sequences move from everywhere."""
        before = self.outcomes.copy()
        moving = asyncio.create_task(self._keep_moving())
        try:
            proof = await self._faults.disturb("worker-worker", way)
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
        return {**proof, "moves": dict(self.outcomes - before)}

    # Moves

    async def _keep_moving(self) -> None:
        while True:
            try:
                async with self._admin() as admin:
                    await self._worker_names(admin)
                    running = await self._running(admin)
                    await asyncio.gather(*(self._migrate(admin, each, "") for each in self._some(running, 4)))
            except (FaultMissed, grpc.aio.AioRpcError):
                pass  # this router has died: the next one
            await asyncio.sleep(0.1)

    async def _kill_beside(
        self, names: list[str], begin: Callable[[str], Awaitable[list["asyncio.Task[str]"]]]
    ) -> dict[str, Any]:
        """Kills one of them while it takes part in moves, which `begin` has begun."""
        calls: list[asyncio.Task[str]] = []
        under_way = 0

        async def prepare(victim: str) -> None:
            nonlocal under_way
            calls.extend(await patiently(partial(begin, victim)))
            await asyncio.sleep(self._random.uniform(0, 0.08))
            under_way = sum(not call.done() for call in calls)

        try:
            proof = await self._faults.kill(names, prepare)
        finally:
            found = Counter(await asyncio.gather(*calls))
        if not under_way:
            raise FaultMissed(f"no move was under way at the kill: {dict(found)}")
        return {**proof, "under_way": under_way, **found}

    async def _begin_moves(self, victim: str, *, source: bool) -> list["asyncio.Task[str]"]:
        """Has the sources themselves move sequences away from a worker, or to it."""
        async with self._admin() as admin:
            names, running = await self._worker_names(admin), await self._running(admin)
        found = [each for each in running if each.owner in names and (names[each.owner] == victim) == source]
        incarnation = next((known for known, name in names.items() if name == victim), "")
        if not found or not incarnation:
            raise FaultMissed(f"nothing can move {'from' if source else 'to'} {victim}")
        target = "" if source else incarnation
        calls = (self._worker_migrate(names[each.owner], each, target) for each in self._some(found, BESIDE_A_KILL))
        return [asyncio.create_task(call) for call in calls]

    async def _begin_moves_by(self, router: str) -> list["asyncio.Task[str]"]:
        async def migrate(each: RunningRequest) -> str:
            async with self._admin(router) as admin:
                return await self._migrate(admin, each, "")

        async with self._admin(router) as admin:
            running = await self._running(admin)
        if not running:
            raise FaultMissed("nothing runs that could move")
        return [asyncio.create_task(migrate(each)) for each in self._some(running, BESIDE_A_KILL)]

    def _some(self, running: Sequence[RunningRequest], most: int) -> list[RunningRequest]:
        return self._random.sample(running, min(most, len(running)))

    async def _migrate(self, admin: admin_pb2_grpc.AdminStub, request: RunningRequest, worker_id: str) -> str:
        """Admin.Migrate, and what became of it."""
        call = admin_pb2.MigrateRequest(request_id=request.request_id, worker_id=worker_id)
        try:
            reply = await admin.Migrate(call, timeout=MOVE_S)
        except grpc.aio.AioRpcError as error:
            return self._note(reason_of(error))
        self._note_sizes(self._names.get(request.owner, ""), reply.worker_id)
        return self._note("moved")

    async def _worker_migrate(self, source: str, request: RunningRequest, target: str) -> str:
        """Worker.Migrate, and what became of it."""
        call = worker_pb2.WorkerMigrateRequest(seq_id=request.seq_id, epoch=request.epoch, target=target)
        outcome, reason = worker_pb2.MIGRATION_OUTCOME_UNSPECIFIED, ""
        try:
            async with open_channel(self._cluster.endpoints[source], internal=True) as channel:
                async for message in worker_pb2_grpc.WorkerStub(channel).Migrate(call, timeout=MOVE_S):
                    outcome, reason = message.outcome, message.failure.reason
        except grpc.aio.AioRpcError as error:
            return self._note(reason_of(error))
        if outcome == worker_pb2.MIGRATION_OUTCOME_MOVED:
            self._note_sizes(source, self._names.get(target, ""))
            return self._note("moved")
        return self._note("ended" if outcome == worker_pb2.MIGRATION_OUTCOME_ENDED else f"stayed: {reason}")

    def _note(self, outcome: str) -> str:
        self.outcomes[outcome] += 1
        return outcome

    def _note_sizes(self, source: str, target: str) -> None:
        """Of a move that was between groups."""
        if self._cluster.groups and {source, target} <= set(self._cluster.workers):
            sizes = self._cluster.num_ranks(source), self._cluster.num_ranks(target)
            self.outcomes[f"moved from {sizes[0]} to {sizes[1]} ranks"] += 1

    async def _undo_drain(self, worker: worker_pb2_grpc.WorkerStub) -> None:
        async def is_undone() -> bool:
            with suppress(grpc.aio.AioRpcError):
                async for _ in worker.Drain(worker_pb2.DrainRequest(undo=True), timeout=5):
                    break
                return True
            return False

        await until(is_undone, UNDO_S)

    # Who is there

    @asynccontextmanager
    async def _admin(self, router: str = "") -> AsyncIterator[admin_pb2_grpc.AdminStub]:
        """A router that lives, or this one."""
        free = [name for name in self._cluster.routers if not self._faults.is_busy(name)]
        if not router and not free:
            raise FaultMissed("no router is there to ask")
        name = router or self._random.choice(free)
        async with open_channel(self._cluster.admin_endpoints[name]) as channel:
            try:
                yield admin_pb2_grpc.AdminStub(channel)
            except grpc.aio.AioRpcError as error:
                raise FaultMissed(f"{name} does not answer: {error.code().name}") from error

    async def _running(self, admin: admin_pb2_grpc.AdminStub) -> Sequence[RunningRequest]:
        reply = await admin.ListSequences(admin_pb2.ListSequencesRequest(), timeout=5)
        return [each for each in reply.sequences if each.state == inference_pb2.REQUEST_STATE_RUNNING]

    async def _worker_names(self, admin: admin_pb2_grpc.AdminStub) -> dict[str, str]:
        """The name of each worker that the router would choose, by its incarnation."""
        reply = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)
        found = {each.incarnation: each.worker_id for each in reply.workers if each.available}
        self._names |= found
        return found

    def _named_target(self, request: RunningRequest, names: dict[str, str]) -> str:
        """Another worker, or none in half of all cases."""
        others = [name for incarnation, name in names.items() if incarnation != request.owner]
        return self._random.choice(others) if others and self._random.random() < 0.5 else ""


async def patiently(begin: Callable[[], Awaitable[Result]]) -> Result:
    """What `begin` returns, as soon as it does not miss."""
    ends = time.monotonic() + WAIT_S
    while True:
        try:
            return await begin()
        except FaultMissed:
            if time.monotonic() > ends:
                raise
        await asyncio.sleep(1.0)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Why a call for a move did not move the sequence, in a word or two."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TIMED_OUT
    if status_in(error) is None:
        return UNANSWERED
    found = error_from(error)
    cause = found.metadata.get("cause", "")
    return f"refused: {found.reason}{f' ({cause})' if cause else ''}"
