"""The runner of a group: rank 0's, which ends with the other ranks."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gpu_worker.group.hosts.host_streams import HostStreams
from gpu_worker.group.hosts.mirrored_blocks import MirroredBlocks
from gpu_worker.group.rank_task import RankUsage
from gpu_worker.group.rank_watch import RankFailed, RankWatch
from gpu_worker.models.decoders.ranks.device_team import DeviceTeam
from gpu_worker.models.decoders.ranks.place import TeamBroken
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.steps.rank_state import RankState
from gpu_worker.steps.runner import AdapterMemory, BlockMemory, PictureMemory, RunnerInfo, StepOutput, ignore
from gpu_worker.steps.step_input import StepInput


class GroupRunner:
    """A Runner. Its blocks lie in memory of all ranks, or pass through it: they move, and reach others, as one's do."""

    pictures: PictureMemory | None = None

    def __init__(self, runner: ModelRunner, watch: RankWatch, team: Any, streams: HostStreams | None = None) -> None:
        """`team` is the extension's, or a DeviceTeam, and is asked for its trouble. `streams` lead to other hosts."""
        self._runner = runner
        self._has_devices = isinstance(team, DeviceTeam)
        self._watch = watch
        self._team = team
        self._streams = streams
        self._mirrored: MirroredBlocks | None = None
        if streams is not None:
            self._mirrored = mirrored = MirroredBlocks(runner.block_memory)
            runner.on_several_hosts = True
            runner.on_moved = lambda step: runner.mirror(mirrored.take_written(step))

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def block_memory(self) -> BlockMemory:
        return self._mirrored or self._runner.block_memory

    @property
    def adapters(self) -> AdapterMemory | None:
        return self._runner.adapters

    @property
    def rank_pids(self) -> list[int]:
        """Of the ranks on this host other than 0, which this process is."""
        return self._watch.pids

    @property
    def rank_states(self) -> Sequence[RankState]:
        own = RankUsage.of_this_process(self._team.waited_s(0))
        front = RankState(
            rank=0,
            host=socket.gethostname(),
            pid=os.getpid(),
            memory_bytes=own.memory_bytes,
            cpu_s=own.cpu_s,
            waited_s=own.waited_s,
        )
        return [front, *self._watch.states()]

    def run(self, step: StepInput, on_copied: Callable[[], None] = ignore) -> StepOutput:
        """`on_copied` is never called: copies of other ranks are not seen here."""
        output = self._runner.run(step)
        if self._has_devices and self._team.trouble:
            self.check_device()  # what a device waited for was broken off, and what it has computed has no sense
        return output

    def check_device(self) -> None:
        """Raises RankFailed if a rank has ended or hangs."""
        if self._watch.loss or self._team.trouble:
            raise RankFailed(self._watch.loss or self._watch.reason(self._team.trouble))
        self._runner.check_device()

    def close(self) -> None:
        if self._has_devices:
            try:
                with suppress(TeamBroken):  # it waits for the copies of all ranks
                    self._runner.close()
            finally:
                self._watch.close()
                self._team.break_off()  # for who still waits for them
                self._team.close()
            return
        self._watch.close()
        self._runner.close()
        if self._streams is not None:
            self._streams.close()
