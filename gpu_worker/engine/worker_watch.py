"""What routers are told of this worker: how busy it is, what its prefix cache has, and whether it drains."""

import asyncio
import time
from collections.abc import Sequence as Seq

from gpu_worker.blocks.prefix_cache import DEMOTED
from gpu_worker.engine.cache_watchers import (
    CacheEvent,
    CacheEventBatch,
    CacheSnapshot,
    CacheWatcher,
    CacheWatchers,
    join_events,
)
from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.load import Load
from gpu_worker.scheduling.state.workload import Workload

REFRESH_EVERY_S = 0.05  # how often load and cache events are brought from a busy engine to the event loop


class WorkerWatch:
    """The latest load, and the open Watch streams. Lives on the event loop; the engine's thread refreshes it."""

    def __init__(self, port: CommandPort, scheduler: Scheduler, workload: Workload, times: StepTimes) -> None:
        """After construction the workload is read in commands and in `refresh` only."""
        self.draining = False  # new sequences are refused
        self.watchers = CacheWatchers()
        self._port = port
        self._scheduler = scheduler
        self._workload = workload
        self.times = times  # of all steps until now
        self._loop = asyncio.get_running_loop()
        self._refreshed = 0.0  # the engine's thread alone uses this and _busy
        self._busy = False
        self.load = Load.of(workload)

    def note_draining(self, draining: bool) -> None:
        """Refuses new sequences from now on, or not any more. Each Watch stream says so now."""
        self.draining = draining
        self.watchers.wake_all()

    async def begin_watch(self, watcher: CacheWatcher) -> CacheEventBatch:
        """The watcher's first batch, with a snapshot of the cache; its later batches go on from there."""
        begun: asyncio.Future[CacheEventBatch] = self._loop.create_future()
        cache = self._workload.tables.cache

        def begin(snapshot: CacheSnapshot) -> None:
            if not begun.done():
                begun.set_result(watcher.begin(snapshot))

        def command(_: Scheduler) -> None:
            self.refresh()  # so that no event from before the snapshot comes after it
            hashes = (cache.block_hashes(), cache.host_hashes())
            self._loop.call_soon_threadsafe(begin, CacheSnapshot(*map(b"".join, hashes)))

        await self._port.ask(command)
        return await begun

    # On the engine's thread, between steps

    def note_round(self) -> None:
        """Refreshes now and then, and at once when the engine gets idle."""
        now, busy = time.monotonic(), self._scheduler.has_work
        if now - self._refreshed > REFRESH_EVERY_S or (self._busy and not busy):
            self._refreshed = now
            self.refresh()
        self._busy = busy

    def refresh(self) -> None:
        """Brings the load, and what the last steps changed in the prefix cache, to the event loop."""
        # The wire has no event for a block that leaves the device for the host pool. Routers count such a block as one
        # on the device until it is in neither, or until their next snapshot.
        cache = self._workload.tables.cache
        events = join_events(change for change in cache.take_events() if change[0] != DEMOTED)
        self._loop.call_soon_threadsafe(self._publish, Load.of(self._workload), events, cache.digest)

    def _publish(self, load: Load, events: Seq[CacheEvent], digest: int) -> None:
        self.load = load
        if events:
            self.watchers.publish_events(events, digest)
