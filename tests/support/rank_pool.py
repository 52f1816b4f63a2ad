"""Ranks of many small groups, one after the other, in processes from the nursery."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from live.nursery import Child, nursery

from gpu_worker.group.rank_service import serve
from gpu_worker.group.rank_task import RankTask
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner

MOST_GROUPS = 96
PATIENCE_S = 60.0  # for a rank that loads its model meanwhile


class RankPool:
    """Ranks 1, 2 and so on of a group; this process is rank 0."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: list[Child] = []
        self._memory = ExitStack()
        self._free = [
            (
                self._memory.enter_context(SharedMemory.create("team")),
                self._memory.enter_context(SharedMemory.create("kv")),
            )
            for _ in range(MOST_GROUPS)
        ]
        self._all = [memory.descriptor for pair in self._free for memory in pair]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end_ranks()
        self._memory.close()

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            rank.close()
        self._ranks.clear()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @contextmanager
    def group(self, model: Path, ranks: int, stages: int = 1, **options: Any) -> Iterator[ModelRunner]:
        """The runner of rank 0."""
        team, arena = self._free.pop()
        size = ranks * stages
        tasks = [
            RankTask(
                rank=rank, size=size, stages=stages, team=team.descriptor, arena=arena.descriptor, tokens=96,
                sequences=16, patience_s=PATIENCE_S, options={"model": str(model), **options},
            )
            for rank in range(size)
        ]  # fmt: skip
        while len(self._ranks) < size - 1:
            self._ranks.append(self._start())
        others = self._ranks[: size - 1]
        for rank, task in zip(others, tasks[1:], strict=True):
            assert rank.stdin is not None
            rank.stdin.write(task.to_json() + "\n")
            rank.stdin.flush()
        place = tasks[0].place()
        try:
            runner = load_runner(**tasks[0].options, place=place)
        except Exception:
            self._end_ranks()
            raise
        watch = [threading.Thread(target=until_done, args=(rank, place.team().break_off)) for rank in others]
        for each in watch:
            each.start()
        try:
            yield runner
        finally:
            place.team().break_off()
            for each in watch:
                each.join()
            if any(rank.poll() is not None for rank in others):
                self._end_ranks()

    def _start(self) -> Child:
        log = self._directory / f"rank-{len(self._ranks) + 1}.log"
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        given = {0: theirs_in, 1: theirs_out, **{number: number for number in self._all}}
        child = nursery().begin([sys.executable, "-m", "rank_pool"], log, self._directory, given)
        for theirs in (theirs_in, theirs_out):
            os.close(theirs)
        child.stdin, child.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        return child


def until_done(rank: Child, break_off: Callable[[], None]) -> None:
    """Reads what a rank says of one group. A rank that ends breaks the team, so that rank 0 need not wait for it."""
    assert rank.stdout is not None
    for line in rank.stdout:
        if line == "done\n":
            return
    break_off()


def main() -> None:
    """A rank: serves groups by what it reads, a task each. What goes wrong is said, and is the end of the group."""
    for told in sys.stdin:
        serve(told, sys.stdout)
        sys.stdout.write("done\n")  # at once: threads of earlier groups write lines, too
        sys.stdout.flush()


if __name__ == "__main__":
    main()
