"""Puts a worker together, and takes it down: server, runner, store, engine, journal, lease."""

import asyncio
import gc
import json
import logging
import os
import threading
import time

from gpu_worker.blocks.swap import CostModel
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.step import Runner, StepResult
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import Workload
from gpu_worker.serving.configuration import build_runner, scheduler_config
from gpu_worker.serving.engine import IDLE_ROUND_S, Engine
from gpu_worker.serving.engine_client import EngineClient
from gpu_worker.serving.journal import Journal
from gpu_worker.serving.lease import Lease
from gpu_worker.serving.listener import Listener
from gpu_worker.serving.step_publisher import StepPublisher
from gpu_worker.serving.step_times import StepTimes
from octavo.errors import ServingError
from octavo.loop import Stopped, before, stop_event
from octavo.retry import until_answered
from octavo.settings import WorkerSettings
from octavo.store import open_store
from octavo.store.base import Store
from octavo.store.calls import Member

log = logging.getLogger(__name__)

LOAD_EVERY_S = 0.05
WATCH_EVERY_S = 0.1
HANG_LEASES = 10  # a step that takes as many leases is taken for a hang
HANG_STATUS = 70
STOP_GRACE_S = 3.0
STORE_PAUSE_S = 0.5


async def serve(settings: WorkerSettings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    stop = stop_event()
    try:
        listener = Listener(settings)
        await listener.open()
    except RuntimeError as error:
        log.error("cannot listen on %s: %s", settings.listen, error)
        return 1
    store = open_store(settings.store)
    try:
        runner = await before(stop, load(settings))
        await before(stop, until_answered(store.open, pause_s=STORE_PAUSE_S, what="start"))
    except ServingError as error:
        log.error("cannot start: %s", error)
        await listener.close(0)
        return 1
    except Stopped:
        log.info("asked to end while starting")
        await listener.close(0)
        os._exit(0)  # a model that another thread loads cannot be interrupted, and there is nothing to save
    gc.collect()
    gc.freeze()  # else a full collection walks all that was imported, and no step begins for a tenth of a second
    worker = Worker(settings, listener, store, runner)
    try:
        worker.start()
        await stop.wait()
    finally:
        await worker.stop()
        await store.close()
        runner.close()
    return 0


async def load(settings: WorkerSettings) -> Runner:
    """Loads in a thread of its own, so that calls are answered meanwhile."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Runner] = loop.create_future()
    started = time.monotonic()
    what = settings.model if settings.runner == "model" else f"the {settings.runner} runner"
    log.info("loading %s", what)

    def settle(runner: Runner | None, error: Exception | None) -> None:
        if loaded.cancelled():
            return
        if runner is not None:
            loaded.set_result(runner)
        elif error is not None:
            loaded.set_exception(error)

    def work() -> None:
        try:
            runner, error = build_runner(settings), None
        except Exception as caught:  # whoever awaits gets it
            runner, error = None, caught
        loop.call_soon_threadsafe(settle, runner, error)

    threading.Thread(target=work, name="load", daemon=True).start()
    runner = await loaded
    log.info("%s on %s is ready to run after %.1f s", runner.info.model, runner.info.device, time.monotonic() - started)
    return runner


class Worker:
    """One worker process life, from loaded to ended."""

    def __init__(self, settings: WorkerSettings, listener: Listener, store: Store, runner: Runner) -> None:
        self.listener = listener
        self._loop = asyncio.get_running_loop()
        self._refreshed = 0.0  # with _busy: the engine's thread alone looks at it
        self._busy = False
        self._lease_s = settings.lease_ms / 1000
        self.workload = Workload(scheduler_config(settings, runner.info), runner.info)
        costs, budget = CostModel(), StepBudget(self.workload.config, runner.info.block_size)
        times = StepTimes(costs, budget, runner.info.bytes_per_block)
        self.scheduler = Scheduler(self.workload, costs, budget)
        idle_round_s = min(IDLE_ROUND_S, self._lease_s / 4)
        self.engine = Engine(self.scheduler, runner, times, self._on_result, self._on_progress, idle_round_s)
        self.publisher = StepPublisher(settings.stream_interval)
        self.engine_client = EngineClient(self.engine, self.workload, budget, self.publisher)
        self.journal = Journal(store if settings.journal == "strict" else None, self.publisher, self.engine_client)
        info = {"worker_id": listener.worker_id, "endpoint": listener.endpoint, "pid": os.getpid()}
        self.lease = Lease(store, Member("worker", listener.incarnation, json.dumps(info).encode()), settings.lease_ms)
        self._journalling: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serves as soon as the loop has gone round and the store knows of it."""
        self._journalling = asyncio.create_task(self.journal.run())
        self._watching = asyncio.create_task(self._watch_progress())
        self.engine.start()
        self.listener.service.ready(self.engine_client)

    async def stop(self) -> None:
        """Takes nothing more, journals what it has, and leaves its sequences to others."""
        self.listener.service.draining = True
        self.listener.health.shut_down()
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self.engine.stop)
        try:
            await asyncio.wait_for(self.journal.flushed(), STOP_GRACE_S)
        except TimeoutError:
            log.warning("the store is away: the last tokens were not journalled, and will be computed again elsewhere")
        if self._journalling is not None:
            self._journalling.cancel()
        self.publisher.end_subscriptions()
        await self.lease.end()
        await self.listener.close()

    # On the engine's thread

    def _on_result(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self.journal.submit, result)

    def _on_progress(self) -> None:
        self.lease.beat()
        now, busy = time.monotonic(), self.scheduler.has_work
        if now - self._refreshed > LOAD_EVERY_S or (self._busy and not busy):  # what was last is told before it idles
            self._refreshed = now
            self.engine_client.refresh()
        self._busy = busy

    # On the event loop

    async def _watch_progress(self) -> None:
        """Health means progress: a worker whose loop hangs says so, and ends so that it can be started again."""
        serving, silent_s, seen = False, 0.0, 0.0
        while True:
            progress = self.engine.last_progress
            # Counted in rounds of this task: time in which the whole process was stopped is nobody's silence.
            silent_s = 0.0 if progress != seen else silent_s + WATCH_EVERY_S
            seen = progress
            if serving != (self.lease.begun and silent_s < self._lease_s):
                serving = not serving
                self.listener.health.set_all(serving)
                if serving:
                    log.info("%s serves", self.listener.worker_id)
                else:
                    log.warning("%s: no step for as long as a lease; not serving", self.listener.worker_id)
            if self.engine.crashed or silent_s > HANG_LEASES * self._lease_s:
                give_up(f"the step loop hangs or has ended ({silent_s:.1f} s without a step)")
            if self._journalling is not None and self._journalling.done():
                give_up(f"the journal has ended: {self._journalling.exception()!r}")
            await asyncio.sleep(WATCH_EVERY_S)


def give_up(why: str) -> None:
    """Ends the process at once: others take over what it ran, and whoever started it starts it again."""
    log.error("%s: this worker gives up", why)
    os._exit(HANG_STATUS)
