"""A worker: its parts, put together in one place, and how they start and stop."""

import asyncio
import json
import logging
import os
import time
from dataclasses import replace
from functools import partial

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.engine.configuration import scheduler_config
from gpu_worker.engine.engine import IDLE_ROUND_S, STOP_TIMEOUT_S, Engine
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.migration.calls.link_share import LinkShare
from gpu_worker.migration.calls.targets import TargetPool, describe_worker
from gpu_worker.migration.prefix.block_supplier import BlockSupplier
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.migration.prefix.warm_up import warm_up
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from gpu_worker.migration.source.source_worker import SourceWorker
from gpu_worker.migration.target.migration_target import MigrationTarget
from gpu_worker.scheduling.planning.step_budget import StepBudget
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.step import StepDeltas
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.admission.announcer import OwnershipAnnouncer
from gpu_worker.serving.admission.reconciler import Reconciler
from gpu_worker.serving.calls.sequence_tracer import SequenceTracer
from gpu_worker.serving.engine_client import EngineClient
from gpu_worker.serving.journal.journal_writer import JournalWriter
from gpu_worker.serving.journal.pending_deltas import AppendPolicy
from gpu_worker.serving.journal.step_publisher import StepPublisher
from gpu_worker.serving.leaving.drain import WorkerDrain
from gpu_worker.serving.leaving.releaser import SequenceReleaser
from gpu_worker.serving.process import progress_monitor
from gpu_worker.serving.process.lease import Lease
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.progress_monitor import ProgressMonitor
from gpu_worker.serving.process.worker_metrics import WorkerMetrics
from gpu_worker.steps.runner import BlockMemory, Runner
from octavo.metrics.aliases import VLLM
from octavo.net.traces import RequestTracer
from octavo.settings.worker import WorkerSettings
from octavo.store.base import Store
from octavo.store.calls import Member
from octavo.wire.endpoint import parse_listener

log = logging.getLogger(__name__)

REFRESH_EVERY_S = 0.05  # how often load and cache events are brought from a busy engine to the event loop
MAX_END_S = 5.0  # of the time that leaving may take: kept for the step in flight, the journal and the last releases
END_SHARE = 0.25  # the same as a share, where leaving may take less
MIN_STEP_S = 2.0  # how long the step in flight may take in any case, unless a person waits for the end
URGENT_STEP_S = 1.0
LEAVE_PATIENCE_S = 3.0  # how long the store may take to note that the worker has left
URGENT_LEAVE_S = 0.5


class Worker:
    """One worker from the loaded model to the end. The engine runs in its own thread, all else on the event loop."""

    def __init__(
        self,
        settings: WorkerSettings,
        listener: Listener,
        store: Store,
        runner: Runner,
        tracer: RequestTracer | None = None,
    ) -> None:
        lease_s = settings.lease_ms / 1000
        idle_round_s = min(IDLE_ROUND_S, lease_s / 4)
        self.listener = listener
        self.workload = Workload(scheduler_config(settings, runner.info), runner.info)
        costs, budget = CostModel(), StepBudget(self.workload.config, runner.info.block_size)
        self.scheduler = Scheduler(self.workload, costs, budget)
        times = StepTimes(costs, budget, runner.info.bytes_per_block)
        self.engine = Engine(self.scheduler, runner, times, self._on_deltas, self._on_progress, idle_round_s)
        self.publisher = StepPublisher(settings.stream_interval)
        self.publisher.start_of = times.forget_start
        self._tracer = tracer
        if tracer is not None:
            listener.service.tracer = SequenceTracer(tracer, listener.worker_id)
            self.publisher.on_forgotten = listener.service.tracer.end
        journal = store if settings.journal == "strict" else None
        announcer = OwnershipAnnouncer(journal, listener.incarnation) if journal is not None else None
        self.engine_client = EngineClient(self.engine, self.workload, budget, self.publisher, announcer)
        policy = (
            AppendPolicy(settings.append_tokens, settings.append_delay_ms / 1000, settings.append_branches)
            if journal is not None
            else AppendPolicy()  # what no store accepts has nothing to wait for
        )
        self.journal_writer = JournalWriter(journal, listener.incarnation, self.publisher, self.engine_client, policy)
        self.step_timeout_s = STOP_TIMEOUT_S  # how long `stop` waits for the step in flight
        self.urgent = False  # whether whoever asked the worker to leave waits for its end
        self._lease_ms = settings.lease_ms
        self._role = settings.role
        self._leave_s = settings.drain_ms / 1000
        self._draining = False
        self.lease = Lease(store, replace(member_of(listener), info=self._description()), settings.lease_ms)
        self.monitor = ProgressMonitor(self.engine, self.lease, listener.health, lease_s)
        releaser = SequenceReleaser(store, self.engine_client, self.journal_writer)
        info = runner.info
        targets = TargetPool(store, listener.incarnation, info.fingerprint, info.layout, info.numerics)
        memory = runner.block_memory if settings.prefix_caching and journal is not None else None
        self.connections: ConnectionPool | None = None
        self.migrations: MigrationRegistry | None = None
        if memory is not None:
            share = LinkShare(settings.move_mbytes_per_s * 1e6 or None, self._others_decode)
            self.connections = ConnectionPool(memory, share, listener.tls)
            if settings.move_limit:
                self.migrations = self._new_migrations(settings, store, targets, self.connections)
        self.drain = WorkerDrain(self.engine_client, releaser, targets, self.migrations, self._note_draining)
        self.target = MigrationTarget(
            store,
            listener.incarnation,
            self.engine_client,
            memory,
            parse_listener(settings.address).host.strip("[]"),
            lambda: listener.service.draining,
            listener.tls,
        )
        self.supplier: BlockSupplier | None = None
        self.fetcher: PrefixFetcher | None = None
        self._warm_up_s = settings.warm_up_ms / 1000
        if memory is not None and self.connections is not None and settings.prefix_fetch:
            self.supplier = BlockSupplier(self.engine_client, targets, self.connections)
            self.fetcher = self._new_fetcher(memory, targets, self.connections)
            self.engine_client.fetcher = self.fetcher
        self.metrics = WorkerMetrics(
            self.engine_client, self.workload, self.journal_writer, self.drain, self.migrations, self.fetcher
        )
        listener.web_app.exporter.add_source(self.metrics.values)
        if settings.metric_aliases == VLLM:
            listener.web_app.exporter.add_source(self.metrics.alias_values)
        self.reconciler = Reconciler(store, listener.incarnation, self.publisher.logs.keys, self.engine_client.runs)
        self._journalling: asyncio.Task[None] | None = None
        self._reconciling: asyncio.Task[None] | None = None
        self._monitoring: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._refreshed = 0.0  # the engine's thread alone uses this and _busy
        self._busy = False

    async def warm_up(self) -> None:
        """Gets the prefixes that other workers use, for half of the blocks here. Call it before `start`, or not at all.

        It takes no longer than a setting says, and raises nothing.
        """
        if self.fetcher is not None and self._warm_up_s:
            self.engine.start()
            num_blocks = self.workload.tables.device.num_blocks // 2
            await warm_up(self.fetcher, self.workload.info, num_blocks, self._warm_up_s)

    def start(self) -> None:
        """Begins to run and to answer. Health says SERVING once the loop goes round and the store knows the worker."""
        self._journalling = asyncio.create_task(self.journal_writer.run())
        self._journalling.add_done_callback(partial(give_up_at_end, "the journal writer"))
        self._reconciling = asyncio.create_task(self.reconciler.run())
        self._reconciling.add_done_callback(partial(give_up_at_end, "the comparison with the store"))
        self._monitoring = asyncio.create_task(self.monitor.run())
        self._monitoring.add_done_callback(partial(give_up_at_end, "the watch over progress"))
        self.engine.start()
        self.listener.service.serve_engine(self.engine_client, self.drain, self.migrations)
        self.listener.transfer.serve_target(self.target, self.supplier)

    async def leave(self, urgent: asyncio.Event) -> None:
        """Refuses new sequences at once, and gives away those that are here while `stop` still has time, or until
        `urgent` is set.
        """
        self.listener.health.shut_down()
        end_s = min(MAX_END_S, END_SHARE * self._leave_s)
        self.step_timeout_s = max(MIN_STEP_S, end_s)
        self.drain.begin(self._leave_s - end_s)
        waiting = [asyncio.create_task(each) for each in (self.drain.wait_until_done(), urgent.wait())]
        await asyncio.wait(waiting, timeout=self._leave_s - end_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if urgent.is_set():
            self.urgent, self.step_timeout_s = True, min(URGENT_STEP_S, self.step_timeout_s)

    async def stop(self) -> bool:
        """Refuses new sequences, journals what has been computed, and releases all that is left to other workers.

        False if the step in flight still runs: its runner must not be closed then.
        """
        self.listener.health.shut_down()
        self.listener.service.draining = True
        cancel_task(self._monitoring)  # before the engine ends: its silence is no hang from here on
        cancel_task(self._reconciling)
        await self.engine_client.stop_fetching()
        for part in (self.fetcher, self.supplier):
            if part is not None:
                await part.close()
        await self.target.close()
        loop_ended = await asyncio.to_thread(self.engine.stop, self.step_timeout_s)
        self.engine_client.trials.stop()
        await self.drain.stop()
        if self.migrations is not None:
            await self.migrations.stop()
        elif self.connections is not None:
            await self.connections.close()
        await self.drain.releaser.release_rest(urgent=self.urgent)
        cancel_task(self._journalling)
        self.publisher.end_subscriptions()
        await self.lease.end(URGENT_LEAVE_S if self.urgent else LEAVE_PATIENCE_S)
        await self.listener.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        return loop_ended

    def _new_migrations(
        self, settings: WorkerSettings, store: Store, targets: TargetPool, connections: ConnectionPool
    ) -> MigrationRegistry:
        source = SourceWorker(
            self.listener.incarnation,
            self.workload.info,
            store,
            self.engine_client,
            self.journal_writer,
            self.publisher,
            connections,
        )
        return MigrationRegistry(source, targets, settings.move_limit)

    def _new_fetcher(
        self, memory: BlockMemory, targets: TargetPool, connections: ConnectionPool
    ) -> PrefixFetcher | None:
        listener = self.target.listener
        if listener is None:
            return None
        return PrefixFetcher(self.listener.incarnation, self.engine_client, memory, listener, targets, connections)

    def _others_decode(self) -> bool:
        """Whether sequences run here besides those that are leaving. All of them leave a worker that drains."""
        if self._draining:
            return False
        leaving = self.migrations.num_branches if self.migrations else 0
        return self.engine_client.report.load.num_running > leaving

    def _description(self) -> bytes:
        info = self.workload.info
        base = {**json.loads(member_of(self.listener).info), "lease_ms": self._lease_ms, "role": self._role}
        return describe_worker(base, info.fingerprint, info.layout, info.numerics, draining=self._draining)

    def _note_draining(self, draining: bool) -> None:
        """Tells callers, routers, probes and the store that this worker drains, or does not any more."""
        self._draining = self.listener.service.draining = draining
        self.monitor.set_draining(draining)
        self.engine_client.watchers.wake_all()
        self.lease.describe(self._description())

    # On the engine's thread

    def _on_deltas(self, result: StepDeltas) -> None:
        self._loop.call_soon_threadsafe(self.journal_writer.submit_deltas, result)

    def _on_progress(self) -> None:
        """Renews the lease and refreshes load and cache events now and then, and at once when the engine gets idle."""
        self.lease.beat()
        now, busy = time.monotonic(), self.scheduler.has_work
        if now - self._refreshed > REFRESH_EVERY_S or (self._busy and not busy):
            self._refreshed = now
            self.engine_client.refresh()
        self._busy = busy


def give_up_at_end(what: str, task: "asyncio.Task[None]") -> None:
    """Ends the process when a task that must run as long as the worker has ended by itself."""
    if not task.cancelled():
        progress_monitor.give_up(f"{what} has ended: {task.exception()!r}")


def cancel_task(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()


def member_of(listener: Listener) -> Member:
    """How the store knows this worker, and what other processes learn of it there."""
    info = {"worker_id": listener.worker_id, "endpoint": listener.endpoint, "pid": os.getpid()}
    return Member("worker", listener.incarnation, json.dumps(info).encode(), listener.worker_id, listener.endpoint)
