"""Starts a group: its memory, its ranks, and the runner of rank 0."""

import logging
import os
from typing import Any

from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.rank_processes import RankFailed, RankProcesses
from gpu_worker.group.rank_task import RankTask
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner
from gpu_worker.running.sizing import cpu_block_bytes
from octavo.process.machine import available_bytes
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)
LEFT_TO_FRONT = ("swap_bytes", "generation_config", "name", "adapter_bytes")  # options that ranks have no use for


def load_group(model: str, *, ranks: int, patience_s: float, **options: Any) -> GroupRunner:
    """A runner whose steps `ranks` processes of this host compute together: this one is rank 0.

    `options` are those of `load_runner`; `threads` are those of each rank. A rank that does not come for `patience_s`
    within a step ends the group. Raises what `load_runner` raises, and RankFailed if another rank cannot start.
    """
    extension = native.load()
    if (device := options.get("device", "cpu")) != "cpu":
        raise InvalidArgument("tensor_parallel", f"a group runs on CPUs alone, not on {device}: leave it out")
    if extension is None:
        raise InvalidArgument("tensor_parallel", f"a group needs the extension: {native.rebuild()}, or leave it out")
    options |= {"kv_cache_bytes": options.get("kv_cache_bytes") or cpu_block_bytes(available_bytes())}
    team, arena = SharedMemory.create("octavo-team"), SharedMemory.create("octavo-blocks")
    of_ranks = {"model": model, **{name: x for name, x in options.items() if name not in LEFT_TO_FRONT}}
    tasks = [
        RankTask(
            rank=rank,
            size=ranks,
            front_pid=os.getpid(),
            team=team.descriptor,
            arena=arena.descriptor,
            tokens=options["max_batch_tokens"],
            sequences=options["max_batch_sequences"],
            patience_s=patience_s,
            options={**of_ranks, "swap_bytes": 0},
        )
        for rank in range(ranks)
    ]

    def anyones_team() -> Any:
        """The team as a thread sees it that is no rank: it says that the team is broken, and why."""
        return extension.Team(team.map(team.num_bytes), 0, ranks, patience_s)

    processes = RankProcesses(tasks[1:], lambda: anyones_team().break_off() if team.num_bytes else None)
    try:
        runner = load_runner(model, place=tasks[0].place(), **options)
        for number, word in enumerate(processes.wait_until_ready(), 1):
            if (word.numerics, word.num_blocks) != (runner.info.numerics, runner.info.num_blocks):
                raise RankFailed(f"rank {number} computes otherwise: {word.numerics}, not {runner.info.numerics}")
    except BaseException:
        processes.close()
        raise
    log.info("a group of %d ranks, %d threads each; pids %s", ranks, options["threads"], [os.getpid(), *processes.pids])
    return GroupRunner(runner, processes, anyones_team())
