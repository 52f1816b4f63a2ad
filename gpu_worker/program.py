"""Puts a worker together, and takes it down: store, runner, engine, journal, service, lease."""

import asyncio
import json
import logging
import os
import signal
import time

from gpu_worker.desk import Desk
from gpu_worker.engine import Engine
from gpu_worker.journal import Journal
from gpu_worker.plan import Runner
from gpu_worker.results import StepResult
from gpu_worker.runners import build_runner, scheduler_config
from gpu_worker.scheduler import Scheduler
from gpu_worker.server import TransferService, WorkerService
from gpu_worker.streams import Streams
from octavo import rpc
from octavo.errors import StoreUnavailable
from octavo.ids import Incarnation, new_incarnation
from octavo.record import Member
from octavo.settings import WorkerSettings
from octavo.store import open_store
from octavo.store.base import Store
from octavo.v1 import transfer_pb2_grpc, worker_pb2_grpc

log = logging.getLogger(__name__)

SERVICES = ("octavo.v1.Worker", "octavo.v1.Transfer")
LOAD_EVERY_S = 0.05
HANG_S = 30.0  # a step that takes longer is taken for a hang
HANG_STATUS = 70
STOP_GRACE_S = 3.0


class Lease:
    """Says to the store that this worker's engine makes progress: the step loop calls `beat`, no timer does."""

    def __init__(self, store: Store, member: Member, lease_ms: int) -> None:
        self._store = store
        self._member = member
        self._lease_ms = lease_ms
        self._next = 0.0
        self._renewing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def beat(self) -> None:
        """Called by the engine's thread after each step and idle round."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._lease_ms / 3000
            self._loop.call_soon_threadsafe(self._renew_soon)

    def _renew_soon(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self.renew())

    async def renew(self) -> None:
        try:
            await self._store.heartbeat(self._member, self._lease_ms)
        except StoreUnavailable as error:
            log.warning("lease not renewed: %s", error)

    async def end(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        try:
            await self._store.leave(self._member)
        except StoreUnavailable:
            pass  # it ends by itself


async def serve(settings: WorkerSettings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    incarnation = new_incarnation()
    worker_id = settings.worker_id or f"worker-{settings.listen.replace(':', '-')}"
    started = time.monotonic()
    runner = await asyncio.to_thread(build_runner, settings)
    log.info("%s: %s on %s, ready to run after %.1f s", worker_id, runner.info.model, runner.info.device,
             time.monotonic() - started)
    store = open_store(settings.store)
    await until_open(store)
    worker = Worker(settings, store, runner, worker_id, incarnation)
    try:
        await worker.start()
        await stop.wait()
    finally:
        await worker.stop()
        await store.close()
        runner.close()
    return 0


async def until_open(store: Store) -> None:
    while True:
        try:
            return await store.open()
        except StoreUnavailable as error:
            log.warning("waiting for the store: %s", error)
            await asyncio.sleep(0.5)


class Worker:
    """One worker process life."""

    def __init__(
        self, settings: WorkerSettings, store: Store, runner: Runner, worker_id: str, incarnation: Incarnation
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._refreshed = 0.0
        scheduler = Scheduler(scheduler_config(settings), runner.info)
        self.engine = Engine(scheduler, runner, self._on_result, self._on_progress)
        self.streams = Streams()
        self.desk = Desk(self.engine, runner.info, self.streams)
        self.journal = Journal(store if settings.journal == "strict" else None, self.streams, self.desk)
        self._server = rpc.server(internal=True)
        self._health = rpc.add_standard_services(self._server, SERVICES)
        self._lease: Lease | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serves only after the store knows this worker and the loop has gone round once."""
        self.service = WorkerService(self._worker_id, self._incarnation, self.desk)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._server)
        transfer_pb2_grpc.add_TransferServicer_to_server(TransferService(), self._server)
        port = self._server.add_insecure_port(self._settings.listen)
        host = self._settings.listen.rsplit(":", 1)[0]
        info = {"worker_id": self._worker_id, "endpoint": f"{host}:{port}", "pid": os.getpid()}
        member = Member("worker", self._incarnation, json.dumps(info).encode())
        await self._server.start()
        self._tasks = [asyncio.create_task(self.journal.run()), asyncio.create_task(self._watch_progress())]
        self._lease = Lease(self._store, member, self._settings.lease_ms)
        self.engine.start()
        await self._lease.renew()
        self._health.set_all(True)
        log.info("%s (%s) listens on %s:%d", self._worker_id, self._incarnation, host, port)

    async def stop(self) -> None:
        """Takes nothing more, journals what it has, and leaves its sequences to others."""
        self.service.draining = True
        self._health.shut_down()
        await asyncio.to_thread(self.engine.stop)
        until = time.monotonic() + STOP_GRACE_S
        while not self.journal.idle and time.monotonic() < until:
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        if self._lease is not None:
            await self._lease.end()
        await self._server.stop(0.5)

    # On the engine's thread

    def _on_result(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self.journal.submit, result)
        if time.monotonic() - self._refreshed > LOAD_EVERY_S:
            self._refresh()

    def _on_progress(self) -> None:
        if self._lease is not None:
            self._lease.beat()
        if not self.engine.scheduler.has_work and time.monotonic() - self._refreshed > LOAD_EVERY_S:
            self._refresh()

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        self.desk.refresh(self.engine.scheduler)

    # On the event loop

    async def _watch_progress(self) -> None:
        """Health means progress: a worker whose loop hangs says so, and ends so that it can be started again."""
        serving = True
        while True:
            await asyncio.sleep(0.5)
            silent_s = time.monotonic() - self.engine.last_progress
            if serving != (silent_s < self._settings.lease_ms / 1000):
                serving = not serving
                self._health.set_all(serving)
            if silent_s > HANG_S or self.engine.crashed:
                log.error("the step loop hangs or has ended (%.0f s without a step): this worker gives up", silent_s)
                os._exit(HANG_STATUS)
