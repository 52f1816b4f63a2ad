"""The runner of a group: rank 0's, which ends with the other ranks."""

from typing import Any

from gpu_worker.group.rank_processes import RankFailed, RankProcesses
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.steps.runner import AdapterMemory, BlockMemory, PictureMemory, RunnerInfo, StepOutput
from gpu_worker.steps.step_input import StepInput


class GroupRunner:
    """A Runner. Its blocks lie in memory of all ranks, so it moves them, and other workers get them, as from one."""

    adapters: AdapterMemory | None = None
    pictures: PictureMemory | None = None

    def __init__(self, runner: ModelRunner, ranks: RankProcesses, team: Any) -> None:
        """`team` is the extension's, and is asked for its trouble alone."""
        self._runner = runner
        self._ranks = ranks
        self._team = team

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def block_memory(self) -> BlockMemory:
        return self._runner.block_memory

    @property
    def rank_pids(self) -> list[int]:
        """Of the ranks other than 0, which this process is."""
        return self._ranks.pids

    def run(self, step: StepInput) -> StepOutput:
        return self._runner.run(step)

    def check_device(self) -> None:
        """Raises RankFailed if a rank has ended or hangs."""
        if loss := self._ranks.loss or self._team.trouble:
            raise RankFailed(loss)
        self._runner.check_device()

    def close(self) -> None:
        self._ranks.close()
        self._runner.close()
