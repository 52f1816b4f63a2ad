"""Starts a group: its memory, its ranks, and the runner of rank 0."""

import logging
import os
from typing import Any

from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.rank_process import RankProcess
from gpu_worker.group.rank_task import RankTask, RankWord
from gpu_worker.group.rank_watch import RankFailed, RankWatch
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner
from gpu_worker.running.sizing import cpu_block_bytes
from gpu_worker.steps.runner import RunnerInfo
from octavo.process.machine import available_bytes
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)
LEFT_TO_FRONT = ("swap_bytes", "generation_config", "name", "adapter_bytes")  # options that ranks have no use for


def load_group(model: str, *, ranks: int, patience_s: float, stages: int = 1, **options: Any) -> GroupRunner:
    """A runner whose steps `stages` times `ranks` processes of this host compute together: this one is rank 0.

    `options` are those of `load_runner`; `threads` are those of each rank. A rank that does not come for `patience_s`
    within a step ends the group. Raises what `load_runner` raises, and RankFailed if another rank cannot start.
    """
    extension = native.load()
    if (device := options.get("device", "cpu")) != "cpu":
        raise InvalidArgument("tensor_parallel", f"a group runs on CPUs alone, not on {device}: leave it out")
    if extension is None:
        raise InvalidArgument("tensor_parallel", f"a group needs the extension: {native.rebuild()}, or leave it out")
    options |= {"kv_cache_bytes": options.get("kv_cache_bytes") or cpu_block_bytes(available_bytes())}
    of_ranks = {
        "model": model,
        **{name: x for name, x in options.items() if name not in LEFT_TO_FRONT},
        "swap_bytes": 0,
    }
    teams: list[Any] = []  # as a thread sees it that is no rank: it says that the team is broken, and why

    def break_off() -> None:
        for each in teams:
            each.break_off()

    with SharedMemory.create("octavo-team") as team, SharedMemory.create("octavo-blocks") as arena:
        tasks = [
            RankTask(
                rank=rank,
                size=stages * ranks,
                stages=stages,
                team=team.descriptor,
                arena=arena.descriptor,
                tokens=options["max_batch_tokens"],
                sequences=options["max_batch_sequences"],
                patience_s=patience_s,
                options=of_ranks,
            )
            for rank in range(stages * ranks)
        ]
        watch = RankWatch([RankProcess(task) for task in tasks[1:]], patience_s, break_off)
        try:
            runner = load_runner(model, place=tasks[0].place(), **options)
            teams.append(tasks[0].place().team())
            _expect_equal(runner.info, watch.wait_until_ready())
        except BaseException:
            watch.close()
            raise
    log.info("a group of %d ranks; pids %s", len(tasks), [os.getpid(), *watch.pids])
    return GroupRunner(runner, watch, teams[0])


def _expect_equal(info: RunnerInfo, words: list[RankWord]) -> None:
    for rank, word in enumerate(words, 1):
        if (word.numerics, word.num_blocks) != (info.numerics, info.num_blocks):
            raise RankFailed(
                f"rank {rank} computes {word.numerics}, and rank 0 {info.numerics}: start the worker again"
            )
