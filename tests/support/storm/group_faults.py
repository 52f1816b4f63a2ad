"""What happens to the processes of groups: a rank or a front is killed, or stops for a while and goes on."""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from effort import patience
from guard.processes import exists, ranks_of
from storm.faults import LONG_STOP, FaultMissed, Faults, Inject, within
from storm.move_faults import patiently
from storm.storm_cluster import StormCluster
from waiting import until

from gpu_worker.group.rank_watch import SILENT_LEASES
from gpu_worker.serving.process.progress_monitor import HANG_STATUS

SHORT_STOP = 0.6  # in leases: for so long a rank may hang in any step
SETTLE_S = 1.0  # within which a rank that has waited for too long has ended
END_S = 15.0  # within which a front gives up that has lost a rank
assert LONG_STOP > SILENT_LEASES  # a rank that stops for so long has ended its group, whether steps run or not


class GroupFaults:
    """What `Faults` does to processes, done to one of a group. `outcomes` counts which groups went on."""

    def __init__(self, cluster: StormCluster, faults: Faults, rng: random.Random) -> None:
        self.outcomes: Counter[str] = Counter()
        self._cluster = cluster
        self._faults = faults
        self._random = rng

    def kinds(self) -> dict[str, Inject]:
        """All of them, by name; none where there is no group."""
        found = (self.kill_rank, self.stop_rank, self.kill_front, self.stop_front)
        names = ("-".join(reversed(each.__name__.split("_"))) for each in found)
        return {n: partial(patiently, each) for n, each in zip(names, found, strict=True) if self._cluster.groups}

    async def kill_rank(self) -> dict[str, Any]:
        """kill -9 of a rank other than 0. The front gives up, and is started again."""
        async with self._a_group() as (name, ranks):
            rank = self._random.choice(ranks)
            os.kill(rank, signal.SIGKILL)
            await self._expect_end(name, ranks)
            return {"victim": name, "pid": rank, "signal": 9}

    async def stop_rank(self) -> dict[str, Any]:
        """SIGSTOP of a rank other than 0: for less than a lease the group waits for it, for many it does not."""
        async with self._a_group() as (name, ranks):
            rank, process = self._random.choice(ranks), self._cluster.processes[name]
            draw = self._random.uniform
            leases = self._random.choice([draw(0.1, SHORT_STOP), draw(1.2, 3.0), LONG_STOP])
            seconds = leases * self._lease_s
            os.kill(rank, signal.SIGSTOP)
            await within(seconds, lambda: not process.running)
            with suppress(ProcessLookupError):  # it has ended with its front
                os.kill(rank, signal.SIGCONT)
            gave_up = await self._settle("rank-stop", name, ranks)
            assert leases > SHORT_STOP or not gave_up, f"{name} gave up, whose rank was stopped for {seconds:.1f} s"
            assert leases < LONG_STOP or gave_up, f"{name} did not give up, whose rank was stopped for {seconds:.1f} s"
            return {"victim": name, "pid": rank, "stopped_s": round(seconds, 1), "gave_up": gave_up}

    async def kill_front(self) -> dict[str, Any]:
        """kill -9 of rank 0. The others end with it."""
        ranks: list[int] = []

        async def note(name: str) -> None:
            ranks.extend(await self._ranks(name))

        found = await self._faults.kill(self._cluster.groups, note)
        await _until_gone(found["victim"], ranks)
        return found

    async def stop_front(self) -> dict[str, Any]:
        """SIGSTOP of rank 0 for longer than the lease. If the others waited for it in a step, the group has ended."""
        async with self._a_group() as (name, ranks):
            process, rank = self._cluster.processes[name], ranks[0]  # of the front's stage, if one is
            seconds = self._lease_s * self._random.choice([self._random.uniform(1.2, 3.5), LONG_STOP])
            if in_step := self._random.random() < 0.5:  # mostly between steps otherwise
                os.kill(rank, signal.SIGSTOP)
                await asyncio.sleep(0.3)
            await asyncio.to_thread(process.pause)
            if in_step:
                os.kill(rank, signal.SIGCONT)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(process.resume)
            gave_up = await self._settle("front-stop", name, ranks)
            return {"victim": name, "in_step": in_step, "stopped_s": round(seconds, 1), "gave_up": gave_up}

    @property
    def _lease_s(self) -> float:
        return self._cluster.shape.lease_ms / 1000

    @asynccontextmanager
    async def _a_group(self) -> AsyncIterator[tuple[str, list[int]]]:
        """One that serves and to which nothing else happens, and its ranks other than 0."""
        async with self._faults.one_of(self._cluster.groups) as name:
            yield name, await self._ranks(name)

    async def _ranks(self, name: str) -> list[int]:
        ranks = ranks_of(self._cluster.processes[name].pid)
        if len(ranks) != self._cluster.num_ranks(name) - 1 or not await self._cluster.serves(name):
            raise FaultMissed(f"{name} does not serve")
        return ranks

    async def _settle(self, kind: str, name: str, ranks: list[int]) -> bool:
        """Whether the group gave up. Then it is started again."""
        await asyncio.sleep(patience(SETTLE_S))
        gave_up = not self._cluster.processes[name].running or not all(map(exists, ranks))
        self.outcomes[f"{kind}: the group {'gave up' if gave_up else 'went on'}"] += 1
        if gave_up:
            await self._expect_end(name, ranks)
        return gave_up

    async def _expect_end(self, name: str, ranks: list[int]) -> None:
        """Of a group that has lost a rank."""
        process = self._cluster.processes[name]
        await until(lambda: not process.running, END_S)
        assert process.exit_code == HANG_STATUS, f"{name} ended with {process.exit_code}:\n{process.tail()}"
        await _until_gone(name, ranks)
        await self._faults.start(name)


async def _until_gone(name: str, ranks: list[int]) -> None:
    try:
        await until(lambda: not any(map(exists, ranks)), END_S)
    except TimeoutError:
        raise AssertionError(f"ranks of {name} have outlived it: {list(filter(exists, ranks))}") from None
