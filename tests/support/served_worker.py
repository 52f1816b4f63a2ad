"""The parts of a worker that sequences come by, put together as `Worker` does it."""

import asyncio
from typing import Any

from scheduler_parts import SchedulerParts

from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.serving.admission.admissions import Admissions
from gpu_worker.serving.admission.prefix_offers import PrefixOffers
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer, TrialQueue
from gpu_worker.steps.runner import Runner
from octavo.request.ids import Incarnation


class ServedParts:
    """Without a store nothing is journalled, and no other worker has blocks. Further options are the engine's."""

    def __init__(
        self, runner: Runner, config: SchedulerConfig, store: Any = None, window_steps: int = 64, **options: Any
    ) -> None:
        self.runner: Any = runner
        self.store: Any = store
        self.parts = parts = SchedulerParts(config, runner.info)
        self.port, self.publisher, owner = parts.port, StepPublisher(), Incarnation("w")
        self.journal_writer = JournalWriter(
            store, owner, self.publisher, parts.port, parts.control, window_steps=window_steps
        )
        self.watch = WorkerWatch(parts.port, parts.scheduler, parts.workload, parts.times)
        submit = self.journal_writer.submit_soon
        self.engine = parts.engine(runner, submit, on_progress=[self.watch.refresh], **options)
        announcer = OwnershipAnnouncer(store, owner) if store is not None else None
        self.trials = TrialQueue(parts.port, self.publisher, announcer)
        offers = PrefixOffers(parts.port, parts.workload, parts.times)
        self.admissions = Admissions(parts.port, parts.workload, self.publisher, self.trials, offers, announcer)

    async def start(self) -> None:
        self.task = asyncio.create_task(self.journal_writer.run())
        self.engine.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self.engine.stop)
        self.trials.stop()
        self.task.cancel()
