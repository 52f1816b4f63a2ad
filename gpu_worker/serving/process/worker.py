"""A worker: its parts, put together in one place, and how they start and stop."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.engine.adapter_loader import AdapterLoader
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.command_port import CommandPort, LoopControl
from gpu_worker.engine.configuration import adapter_bytes, scheduler_config
from gpu_worker.engine.engine import IDLE_ROUND_S, STOP_TIMEOUT_S, Engine
from gpu_worker.engine.picture_loader import PictureLoader
from gpu_worker.engine.picture_shelf import PictureShelf
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.pending_items import AppendPolicy
from gpu_worker.journal.sequence_tracer import SequenceTracer
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.link_share import LinkShare
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.migration.calls.targets import TargetPool
from gpu_worker.migration.disk.disk_tier import DiskTier
from gpu_worker.migration.prefix.block_supplier import BlockSupplier
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher, warm_up
from gpu_worker.migration.source.migration_progress import MigrationTally
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from gpu_worker.migration.source.target_exchange import SourceWorker
from gpu_worker.migration.standby.standby_buddy import StandbyBuddy
from gpu_worker.migration.standby.standby_owner import StandbyOwner
from gpu_worker.migration.target.migration_target import MigrationTarget
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.admission.admissions import Admissions
from gpu_worker.serving.admission.prefix_offers import PrefixOffers
from gpu_worker.serving.admission.reconciler import Reconciler
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer, TrialQueue
from gpu_worker.serving.calls.kept_prefixes import KeptPrefixes
from gpu_worker.serving.calls.vector_calls import VectorCalls
from gpu_worker.serving.calls.worker_service import ServedWorker
from gpu_worker.serving.leaving.drain import WorkerDrain
from gpu_worker.serving.leaving.releaser import OutgrownRelease, SequenceReleaser
from gpu_worker.serving.process import progress_monitor
from gpu_worker.serving.process.lease import Lease
from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.progress_monitor import ProgressMonitor
from gpu_worker.serving.process.worker_metrics import WorkerMetrics
from gpu_worker.steps.rank_state import HasRanks
from gpu_worker.steps.runner import Runner
from octavo.metrics.aliases import VLLM
from octavo.net.traces import RequestTracer
from octavo.request.errors import InvalidArgument
from octavo.settings.worker import WorkerSettings
from octavo.store.base import Store
from octavo.store.calls import Member
from octavo.wire.endpoint import parse_listener

log = logging.getLogger(__name__)

MAX_END_S = 5.0  # of the time that leaving may take: kept for the step in flight, the journal and the last releases
END_SHARE = 0.25  # the same as a share, where leaving may take less
MIN_STEP_S = 2.0  # how long the step in flight may take in any case, unless a person waits for the end
URGENT_STEP_S = 1.0
LOOK_S = 5.0  # how long a start waits for a slow disk to list its files
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
        draft_model: DraftModel | None = None,
    ) -> None:
        info, incarnation = runner.info, listener.incarnation
        journal = store if settings.journal == "strict" else None
        memory = runner.block_memory if settings.prefix_caching and journal is not None else None
        self.listener = listener
        self.urgent = False  # whether whoever asked the worker to leave waits for its end
        self.step_timeout_s = STOP_TIMEOUT_S  # how long `stop` waits for the step in flight
        self._settings = settings
        self._tracer = tracer

        # The ways into the engine's thread, what it measures, and what is told of it
        self.workload = Workload(scheduler_config(settings, info), info)
        costs, budget = CostModel(), StepBudget(self.workload.config, info.block_size)
        self.scheduler = Scheduler(self.workload, costs, budget, draft_model=draft_model)
        times = StepTimes(costs, budget, info.bytes_per_block)
        port = CommandPort(self.scheduler)
        self.shelf = AdapterShelf(
            runner.adapters, adapter_bytes(settings, info), self.workload.adapters_in_use, info.lora_support
        )
        adapters = AdapterLoader(self.shelf, port)
        self.picture_shelf = PictureShelf(runner.pictures, settings.picture_cache_bytes, self.workload.pictures_in_use)
        pictures = PictureLoader(self.picture_shelf, port, store.read_picture, info.pictures)
        control, blocks = LoopControl(port), BlockPort(port, self.workload, adapters, pictures)
        self.watch = WorkerWatch(port, self.scheduler, self.workload, times)
        self.watch.adapters = lambda: self.shelf.digests
        if isinstance(runner, HasRanks):
            self.watch.ranks = lambda: runner.rank_states

        # Tokens on their way out
        sequence_tracer = SequenceTracer(tracer, listener.worker_id) if tracer is not None else None
        self.publisher = StepPublisher(settings.stream_interval, times, sequence_tracer)
        policy = (
            AppendPolicy(settings.append_tokens, settings.append_delay_ms / 1000, settings.append_branches)
            if journal is not None
            else AppendPolicy()  # what no store accepts has nothing to wait for
        )
        self.journal_writer = JournalWriter(journal, incarnation, self.publisher, port, control, policy)

        # Blocks and sequences that go to other workers
        targets = TargetPool(store, incarnation, info.fingerprint, info.layout, info.numerics, listener.worker_id)
        share = LinkShare(settings.move_mbytes_per_s * 1e6 or None, self._others_decode)
        self.connections = ConnectionPool(memory, share, listener.tls) if memory is not None else None
        self.migrations: MigrationRegistry | None = None
        if self.connections is not None and settings.move_limit:
            source = SourceWorker(
                incarnation, store, blocks, self.journal_writer, self.publisher, targets, self.connections
            )
            self.migrations = MigrationRegistry(source, settings.move_limit)

        # Blocks and sequences that come from them
        host = parse_listener(settings.address).host.strip("[]")
        block_listener = BlockListener(host, tls=listener.tls) if memory is not None else None
        self.supplier: BlockSupplier | None = None
        self.fetcher: PrefixFetcher | None = None
        if memory is not None and block_listener is not None and self.connections is not None and settings.prefix_fetch:
            self.supplier = BlockSupplier(blocks, targets, self.connections)
            self.fetcher = PrefixFetcher(incarnation, blocks, memory, block_listener, targets, self.connections)
        self.standby_owner: StandbyOwner | None = None
        self.standby_buddy: StandbyBuddy | None = None
        if memory is not None and self.fetcher is not None and self.connections is not None and settings.standby:
            self.standby_owner = StandbyOwner(
                incarnation, blocks, targets, self.connections, self.watch, settings.standby_tokens, memory
            )
            self.standby_buddy = StandbyBuddy(blocks, self.watch, self.fetcher, memory)
        self.disk: DiskTier | None = None
        if settings.disk_tier:
            if memory is None:
                raise InvalidArgument("disk_tier", "needs --prefix-caching and --journal=strict")
            directory, most_bytes, watch = settings.disk_tier, settings.disk_tier_bytes, self.watch
            self.disk = DiskTier(
                *(directory, most_bytes, blocks, memory),
                publish=watch.watchers.publish_files,
                is_busy=lambda: watch.load.num_running > 0,
            )
        announcer = OwnershipAnnouncer(journal, incarnation) if journal is not None else None
        self.trials = TrialQueue(port, self.publisher, announcer)
        self.offers = PrefixOffers(
            port, self.workload, times, self.fetcher, self.disk.reader if self.disk is not None else None
        )
        self.vectors = VectorCalls(port, info)
        self.admissions = Admissions(
            port, self.workload, self.publisher, self.trials, self.offers, announcer, adapters, pictures
        )
        self.target = MigrationTarget(
            store, incarnation, blocks, self.admissions.admit, self.watch, memory, block_listener
        )

        # The loop, its lease, and the end of both
        self.lease = Lease(store, replace(member_of(listener), info=self._description()), settings.lease_ms)
        self.engine = Engine(
            port,
            control,
            self.scheduler,
            runner,
            times,
            self.journal_writer.submit_soon,
            (self.lease.beat, self.watch.note_round, *([self.standby_owner.note_round] if self.standby_owner else [])),
            min(IDLE_ROUND_S, settings.lease_ms / 4000),
        )
        lease_s = settings.lease_ms / 1000
        self.monitor = ProgressMonitor(self.engine, self.lease, listener.health, lease_s, lambda: self.watch.ranks())
        releaser, outgrown = (
            SequenceReleaser(store, port, self.workload, budget, self.publisher, self.journal_writer) for _ in range(2)
        )
        self.drain = WorkerDrain(port, self.publisher, releaser, targets, self.migrations, self._note_draining)
        self._outgrown = OutgrownRelease(store, self.workload, outgrown)
        self.reconciler = Reconciler(store, incarnation, self.publisher.logs.keys, self.admissions.runs)
        tally = self.migrations.tally if self.migrations is not None else MigrationTally()
        self.metrics = WorkerMetrics(
            self.watch,
            self.workload,
            self.publisher,
            self.journal_writer,
            self.drain,
            tally,
            self.shelf,
            pictures,
            self.fetcher,
            self.standby_owner,
            self.standby_buddy,
            self.disk,
        )
        exporter = listener.web_app.exporter
        exporter.add_source(self.metrics.values)
        if settings.metric_aliases == VLLM:
            exporter.add_source(self.metrics.alias_values)
        self._served = ServedWorker(
            self.engine,
            self.workload,
            budget,
            self.admissions,
            self.publisher,
            self.watch,
            self.vectors,
            KeptPrefixes(port, self.workload.tables.cache, self.workload.info.num_blocks),
            self.drain,
            self.migrations,
            sequence_tracer,
            self.shelf.support(stored_type=info.device == "cpu"),
            self.picture_shelf.support(info.pictures),
        )
        self._watching: list[asyncio.Task[None]] = []
        self._journalling: asyncio.Task[None] | None = None

    async def warm_up(self) -> None:
        """Gets prefixes that were used last, from the disk and then from other workers, for half of the blocks here.

        Call it before `start`, or not at all. It takes no longer than a setting says, and raises nothing.
        """
        sources = self.fetcher, self.disk
        if self.disk is not None:
            look = asyncio.create_task(
                self.disk.list.look()
            )  # so that routers know the files when they know the worker
            await asyncio.wait({look}, timeout=LOOK_S)
        if sources == (None, None) or not self._settings.warm_up_ms:
            return
        self.engine.start()
        num_blocks = self.workload.tables.device.num_blocks // 2
        ends_at = time.monotonic() + self._settings.warm_up_ms / 1000
        if self.disk is not None:
            num_blocks -= await self.disk.reader.warm_up(num_blocks, ends_at - time.monotonic())
        if self.fetcher is not None:
            await warm_up(self.fetcher, self.workload.info, num_blocks, ends_at - time.monotonic())

    async def learn_limits(self) -> None:
        """Asks the store how large other workers are, until it answers: what outgrows this worker goes to those."""
        await self._outgrown.learn_limits()

    def start(self) -> None:
        """Begins to run and to answer. Health says SERVING once the loop goes round and the store knows the worker."""
        self._journalling = run_for_ever("the journal writer", self.journal_writer.run())
        self._watching = [
            run_for_ever("the comparison with the store", self.reconciler.run()),
            run_for_ever("the watch over progress", self.monitor.run()),
            run_for_ever("the lifeline to the store", self.lease.hold_lifeline()),
            run_for_ever("the release of what outgrows this worker", self._outgrown.run()),
        ]
        if self.standby_owner is not None and self.standby_buddy is not None:
            self._watching += [
                run_for_ever("the standbys of sequences here", self.standby_owner.run()),
                run_for_ever("the standbys for other workers", self.standby_buddy.run()),
            ]
        if self.disk is not None:
            self._watching += [
                run_for_ever("the disk tier", self.disk.writer.run()),
                run_for_ever("the list of files", self.disk.list.run()),
            ]
        self.engine.start()
        self.listener.service.serve(self._served)
        self.listener.transfer.serve_target(self.target, self.supplier, self.standby_buddy)

    async def leave(self, urgent: asyncio.Event) -> None:
        """Refuses new sequences at once, and gives away those that are here while `stop` still has time, or until
        `urgent` is set.
        """
        self.listener.health.shut_down()
        leave_s = self._settings.drain_ms / 1000
        end_s = min(MAX_END_S, END_SHARE * leave_s)
        self.step_timeout_s = max(MIN_STEP_S, end_s)
        self.drain.begin(leave_s - end_s)
        waiting = [asyncio.create_task(each) for each in (self.drain.wait_until_done(), urgent.wait())]
        await asyncio.wait(waiting, timeout=leave_s - end_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if urgent.is_set():
            self.urgent, self.step_timeout_s = True, min(URGENT_STEP_S, self.step_timeout_s)

    async def stop(self) -> bool:
        """Refuses new sequences, journals what has been computed, and releases all that is left to other workers.

        False if the step in flight still runs: its runner must not be closed then.
        """
        self.listener.health.shut_down()
        self.watch.draining = True
        for task in self._watching:  # before the engine ends: its silence is no hang from here on
            task.cancel()
        self.vectors.close()
        await self.offers.close()
        if self.disk is not None:
            await self.disk.close(urgent=self.urgent)
        if self.supplier is not None:
            await self.supplier.close()
        await self.target.close()
        loop_ended = await asyncio.to_thread(self.engine.stop, self.step_timeout_s)
        self.trials.stop()
        await self.drain.stop()
        if self.migrations is not None:
            await self.migrations.stop()
        elif self.connections is not None:
            await self.connections.close()
        await self.drain.releaser.release_rest(urgent=self.urgent)
        if self._journalling is not None:
            self._journalling.cancel()
        self.publisher.end_subscriptions()
        await self.lease.end(URGENT_LEAVE_S if self.urgent else LEAVE_PATIENCE_S)
        await self.listener.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        return loop_ended

    def _others_decode(self) -> bool:
        """Whether sequences run here besides those that are leaving. All of them leave a worker that drains."""
        num_leaving = self.migrations.num_moving_branches if self.migrations is not None else 0
        return not self.watch.draining and self.watch.load.num_running > num_leaving

    def _description(self) -> bytes:
        info = self.workload.info
        of_model = {"fingerprint": info.fingerprint, "layout": info.layout, "numerics": info.numerics}
        settings = {"lease_ms": self._settings.lease_ms, "role": self._settings.role}
        base = json.loads(member_of(self.listener).info)
        return json.dumps({**base, **settings, **of_model, "draining": self.watch.draining}).encode()

    def _note_draining(self, draining: bool) -> None:
        """Tells callers, routers, probes and the store that this worker drains, or does not any more."""
        self.watch.note_draining(draining)
        self.monitor.set_draining(draining)
        self.lease.describe(self._description())


def run_for_ever(what: str, coroutine: Coroutine[None, None, None]) -> "asyncio.Task[None]":
    """Begins what must run as long as the worker. If it ends by itself, the process ends."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(partial(give_up_at_end, what))
    return task


def give_up_at_end(what: str, task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        progress_monitor.give_up(f"{what} has ended: {task.exception()!r}")


def member_of(listener: Listener) -> Member:
    """How the store knows this worker, and what other processes learn of it there."""
    info = {"worker_id": listener.worker_id, "endpoint": listener.endpoint, "pid": os.getpid()}
    return Member("worker", listener.incarnation, json.dumps(info).encode(), listener.worker_id, listener.endpoint)
