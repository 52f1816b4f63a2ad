"""A scheduler and what it is made of, put together as a worker does it."""

import time
from collections.abc import Callable, Iterator

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.engine.command_port import CommandPort, LoopControl
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.load import Load
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig, StepBudget
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import StepItems
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import Runner, RunnerInfo
from octavo.request.ids import SequenceId
from octavo.request.step_item import StepItem


class SchedulerParts:
    """A workload, its scheduler, and the measurements that the scheduler goes by."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: RunnerInfo,
        clock: Callable[[], float] = time.monotonic,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.workload = Workload(config, info)
        self.costs, self.budget = CostModel(), StepBudget(config, info.block_size)
        self.scheduler = Scheduler(self.workload, self.costs, self.budget, clock, draft_model)
        self.times = StepTimes(self.costs, self.budget, info.bytes_per_block)
        self.port = CommandPort(self.scheduler)
        self.control = LoopControl(self.port)

    def load(self) -> Load:
        return Load.of(self.workload)

    def sequence(self, name: str) -> Sequence:
        return self.workload.sequences[SequenceId(name)]

    def run_all(self, runner: Runner, *sequences: Sequence) -> Iterator[StepItem]:
        """Admits the sequences, and yields what each step brings until all have ended."""
        for sequence in sequences:
            assert self.scheduler.admit(sequence).admitted
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            yield from self.scheduler.commit(plan, runner.run(plan.input)).items

    def engine(self, runner: Runner, on_items: Callable[[StepItems], None], **options: object) -> Engine:
        """An engine that drives the scheduler; it has not started."""
        return Engine(self.port, self.control, self.scheduler, runner, self.times, on_items, **options)  # type: ignore[arg-type]
