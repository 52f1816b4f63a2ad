"""The faults of a storm. Each is shown to have happened: where it has not, it raises FaultMissed, and the run fails."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from guard.processes import state_of
from storm.fault_proxy import BLACK_HOLE, DROPPED_REPLIES, Condition, FaultProxy
from storm.storm_cluster import StormCluster
from waiting import until

GRACE_S = 60.0  # within which a process that was asked to leave has ended
READY_S = 20.0  # and the time in which a worker loads its model
LONG_STOP = 6.0  # in leases: longer than lease and grace of a request
OUT_S = 12.0  # longer than the grace of a request
TRAFFIC_S = 10.0  # within which something comes over a link, else another link is tried
LINK_TRIES = 4
WAYS = ("latency", "black-hole", "reset", "dropped-reply", "slow")
# The count that shows it; of the others "lost".
PROOFS = {"latency": "delayed", "slow": "slowed", "reset": "resets", "damaged": "damaged"}
Prepare = Callable[[str], Awaitable[None]]
Inject = Callable[[], Awaitable[dict[str, Any]]]  # a fault, from its beginning to its end; its proof
LINKS = ("client-router", "router-worker", "router-store", "worker-store")

# When the fault of the current task began, which may have waited for another fault to end.
BEGAN: ContextVar[float] = ContextVar("BEGAN")


class FaultMissed(Exception):
    """What was to be done to a process or a link did not happen, so the run proves nothing."""


class Faults:
    """Does one fault at a time to each process or link. Every method returns when the fault is over and all is healed,
    and what it returns is the proof, for the log."""

    def __init__(self, cluster: StormCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._random = rng
        self._locks = {name: asyncio.Lock() for name in [*cluster.processes, "store", *cluster.links]}

    def is_busy(self, name: str) -> bool:
        """Whether a fault is being done to that process."""
        return self._locks[name].locked()

    def kinds(self) -> dict[str, Inject]:
        """All that can happen on this machine, by name, except the kills of workers and routers."""
        found: dict[str, Inject] = {
            "routers-out": self.kill_all_routers,
            "store-kill": self.kill_store,
            "store-stop": self.stop_store,
            "promotion-planned": self.promote_by_plan,
            "promotion-lossy": self.promote_with_loss,
            "maxmemory": self.fill_memory,
        }
        for who, names in (("worker", self._cluster.workers), ("router", self._cluster.routers)):
            found |= {f"{who}-term": partial(self.leave, names), f"{who}-stop": partial(self.stop, names)}
        if self._cluster.store.primary.disk.mounted:
            found["disk-full"] = self.fill_disk
        return found | {f"{link}-{way}": partial(self.disturb, link, way) for link in LINKS for way in WAYS}

    # Processes

    async def kill(self, names: list[str], prepare: Prepare | None = None) -> dict[str, Any]:
        """kill -9 of one of them, and its start after a while. `prepare` is called before with its name."""
        async with self.one_of(names) as name:
            if prepare is not None:
                await prepare(name)
            process = self._cluster.processes[name]
            pid = process.pid
            await asyncio.to_thread(process.kill)  # raises unless SIGKILL ended it
            await asyncio.sleep(self._random.choice([0.0, 0.2, 0.6, 2.0]))
            await self.start(name)
            return {"victim": name, "pid": pid, "signal": 9}

    async def kill_all_routers(self) -> dict[str, Any]:
        """kill -9 of all routers, for longer than the grace. One comes back, sweeps and dies; then all come back."""
        names = self._cluster.routers
        async with AsyncExitStack() as stack:
            for name in names:
                await stack.enter_async_context(self._locks[name])
            BEGAN.set(time.monotonic())
            pids = [self._cluster.processes[name].pid for name in names]
            for name in names:
                await asyncio.to_thread(self._cluster.processes[name].kill)
            await asyncio.sleep(OUT_S)
            await self.start(names[0])
            await asyncio.sleep(2.0)
            await asyncio.to_thread(self._cluster.processes[names[0]].kill)
            await asyncio.sleep(OUT_S)
            await asyncio.gather(*map(self.start, names))
            return {"pids": pids, "signal": 9, "out_s": 2 * OUT_S}

    async def leave(self, names: list[str]) -> dict[str, Any]:
        """SIGTERM: the process leaves by plan, with status 0."""
        async with self.one_of(names) as name:
            process = self._cluster.processes[name]
            await until(lambda: handles_sigterm(process.pid))  # it may have been started just now
            began = time.monotonic()
            code = await asyncio.to_thread(process.stop, GRACE_S)  # which kills it then
            took = time.monotonic() - began
            await self.start(name)
            assert code == 0, f"{name} ended with {code}, {took:.0f} s after SIGTERM"
            return {"victim": name, "code": code, "left_after_s": round(took, 2)}

    async def stop(self, names: list[str]) -> dict[str, Any]:
        """SIGSTOP for longer than the lease."""
        async with self.one_of(names) as name:
            process = self._cluster.processes[name]
            leases = self._random.choice([self._random.uniform(1.2, 3.5), self._random.uniform(1.2, 3.5), LONG_STOP])
            seconds = self._cluster.shape.lease_ms / 1000 * leases
            await asyncio.to_thread(process.pause)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(process.resume)  # raises unless it was stopped all the time
            return {"victim": name, "stopped_s": round(seconds, 1)}

    async def start(self, name: str) -> None:
        """Of a process that has ended; returns when it serves."""
        await asyncio.to_thread(self._cluster.processes[name].start)
        with suppress(TimeoutError):  # it may wait for a store that is gone: the end of the run waits for everybody
            await self._cluster.ready(name, READY_S + self._cluster.load_s)

    # The store

    async def kill_store(self) -> dict[str, Any]:
        """kill -9 of the primary, and its start with its data."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            pid = store.primary.pid
            await store.primary.kill()
            down_s = self._random.choice([0.0, 0.3, 1.0, 3.0, 6.0])
            await asyncio.sleep(down_s)
            await store.primary.start()
            await store.in_step()
            return {"victim": store.primary.name, "pid": pid, "signal": 9, "down_s": down_s}

    async def stop_store(self) -> dict[str, Any]:
        """SIGSTOP of the primary."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            pid, seconds = store.primary.pid, self._random.uniform(0.5, 6.0)
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            stopped = state_of(pid)
            os.kill(pid, signal.SIGCONT)
            await store.in_step()
            if stopped != "T":
                raise FaultMissed("the store was not stopped all the time")
            return {"victim": store.primary.name, "stopped_s": round(seconds, 1)}

    async def promote_by_plan(self) -> dict[str, Any]:
        """The replica becomes the primary; no write is lost."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            old = store.primary.name
            await store.promote_by_plan()
            self._cluster.point_at_primary()
            role = (await store.primary.info("replication"))["role"]
            await store.follow()
            if role != "master" or store.primary.name == old:
                raise FaultMissed("the replica was not promoted")
            return {"from": old, "to": store.primary.name, "role": role}

    async def promote_with_loss(self) -> dict[str, Any]:
        """The replica falls behind, the primary dies, and the replica becomes the primary with what it has."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            await store.in_step()
            old = store.primary.name
            await store.fall_behind()
            await asyncio.sleep(self._random.uniform(0.2, 2.0))
            lost = await store.promote_what_there_is()
            self._cluster.point_at_primary()
            await store.replica.start()
            await store.follow()
            if lost <= 0:
                raise FaultMissed("the replica had not fallen behind")
            return {"from": old, "to": store.primary.name, "role": "master", "lost_bytes": lost}

    async def fill_memory(self) -> dict[str, Any]:
        """maxmemory is reached: less than what is used already."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            client, before = store.primary.client, await store.primary.num_refused("OOM")
            used = int((await store.primary.info("memory"))["used_memory"])
            seconds = self._random.uniform(1.0, 6.0)
            limit = (await client.config_get("maxmemory"))["maxmemory"]
            await client.config_set("maxmemory", max(1, used // 2))
            try:
                await asyncio.sleep(seconds)
                await within(TRAFFIC_S, lambda: self._has_refused("OOM", before))
            finally:
                await client.config_set("maxmemory", limit)
            refused = await store.primary.num_refused("OOM") - before
            if refused <= 0:
                raise FaultMissed("no write was refused for want of memory")
            return {"seconds": round(seconds, 1), "refused": refused}

    async def _has_refused(self, code: str, before: int) -> bool:
        return await self._cluster.store.primary.num_refused(code) > before

    async def _writes(self) -> bool:
        """Whether the last write of the append-only file was well."""
        return bool((await self._cluster.store.primary.info("persistence"))["aof_last_write_status"] == "ok")

    async def _has_rewritten(self, before: int) -> bool:
        return await self._cluster.store.primary.num_rewritten() > before

    async def fill_disk(self) -> dict[str, Any]:
        """The disk of the append-only file is full. The server begins a new file when there is room again."""
        store = self._cluster.store
        async with self.one_of(["store"]):
            server = store.primary
            before, rewritten = await server.num_refused("MISCONF"), await server.num_rewritten()
            seconds = self._random.uniform(1.0, 6.0)
            server.disk.resize(f"{server.disk.used_kib() + 16}k")
            failed, ends = False, time.monotonic() + seconds
            try:
                while time.monotonic() < ends:
                    failed |= not await self._writes()
                    await asyncio.sleep(0.2)
            finally:
                server.disk.resize("512m")
            refused = await server.num_refused("MISCONF") - before
            await until(self._writes, 60)
            if not failed or refused <= 0:
                raise FaultMissed(f"the full disk was not felt: failed {failed}, refused {refused}")
            # The next full disk would damage the file that this one was full with.
            await until(lambda: self._has_rewritten(rewritten), 60)
            return {"seconds": round(seconds, 1), "refused": refused}

    # The network

    async def disturb(self, where: str, way: str) -> dict[str, Any]:
        """A link of that kind has a bad network for a while."""
        names = [name for name in self._cluster.links if _kind_of(name) == where]
        for _ in range(LINK_TRIES):
            async with self.one_of(names) as name:
                link = self._cluster.links[name]
                before = link.counts.copy()
                seconds = await self._disturb(link, way)
                done = {key: count - before[key] for key, count in link.counts.items() if count > before[key]}
                if done.get(PROOFS.get(way, "lost"), 0) > 0:
                    return {"link": name, "seconds": round(seconds, 1), **done}
        raise FaultMissed(f"{where}-{way}: nothing came over any link, so nothing happened")

    async def _disturb(self, link: FaultProxy, way: str) -> float:
        seconds = self._random.uniform(0.5, 8.0)
        if way == "reset":
            await within(TRAFFIC_S, lambda: link.num_connections > 0)
            link.reset()
            return 0.0
        count = PROOFS.get(way, "lost")
        before = link.counts[count]
        link.condition = {
            "latency": Condition(latency_s=self._random.uniform(0.02, 0.5)),
            "slow": Condition(bytes_per_s=self._random.uniform(2_000, 20_000)),
            "black-hole": BLACK_HOLE,
            "dropped-reply": DROPPED_REPLIES,
            "damaged": Condition(damages=self._random.choice([0.01, 0.3, 1.0])),
        }[way]
        try:
            await asyncio.sleep(seconds)
            await within(TRAFFIC_S, lambda: link.counts[count] > before)
        finally:
            link.heal()
        return seconds

    @asynccontextmanager
    async def one_of(self, names: list[str]) -> AsyncIterator[str]:
        """One of them to which nothing happens yet, for as long as the context lasts."""
        while not (free := [name for name in names if not self._locks[name].locked()]):
            await asyncio.sleep(0.05)
        name = self._random.choice(free)
        async with self._locks[name]:
            BEGAN.set(time.monotonic())
            yield name


def _kind_of(link: str) -> str:
    """client-router, router-worker, worker-worker, router-store or worker-store."""
    first, _, second = link.partition("-")
    kinds = {"blocks": "worker-worker", "client": "client-router", "router": "router-worker"}
    return kinds.get(first) or f"{'router' if first[0] == 'r' else 'worker'}-{second}"


async def within(seconds: float, happened: Callable[[], object]) -> None:
    """Waits until it has happened, or the time is over, also on a busy machine."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await until(happened, 10 * seconds)


def handles_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM, by the mask of caught signals that the kernel shows."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
