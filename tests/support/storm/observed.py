"""Runs a module as a program that tells what it has.

    python -m storm.observed FILE [--load-s SECONDS] [--step-s SECONDS] [--blocks PORT] MODULE ARGS...

At SIGUSR1 it writes the number of asyncio tasks, their names, and what is left of moves to FILE as JSON. Threads and
open files are in /proc.

A worker listens for blocks on any free port, and tells it to those that send to it. With `--blocks` it tells PORT
instead, where a proxy listens, and writes its own port to FILE with the suffix `.blocks`. With `--load-s` it begins
only after so many seconds, as a worker does whose model takes long to load. With `--step-s` each step of a model takes
so much longer.
"""

import asyncio
import gc
import json
import os
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any


def main() -> None:
    target = Path(sys.argv[1])

    def tell(signum: int, frame: FrameType | None) -> None:
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:  # no loop runs yet
            tasks = set()
        names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
        found = {"pid": os.getpid(), "tasks": len(tasks), "names": dict(names), "moves": num_moves()}
        replace_text(target, json.dumps(found))

    signal.signal(signal.SIGUSR1, tell)
    sys.argv = sys.argv[2:]
    options = {
        "--load-s": lambda value: time.sleep(float(value)),
        "--step-s": lambda value: slow_down(float(value)),
        "--blocks": lambda value: tell_other_port(int(value), target.with_suffix(".blocks")),
    }
    while apply := options.get(sys.argv[0]):
        apply(sys.argv[1])
        sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def num_moves() -> dict[str, int]:
    """How many sequences leave this process and come to it, and what is held for them: found among all objects."""
    found = Counter[str]()
    for each in gc.get_objects():
        kind = type(each).__name__
        if kind in COUNTED:
            found[COUNTED[kind][0]] += COUNTED[kind][1](each)
    return {name: count for name, count in found.items() if count}


# What of an object of each class is left of a move.
COUNTED: dict[str, tuple[str, Any]] = {
    "MigrationRegistry": ("outgoing migrations", lambda registry: len(registry.moving)),
    "MigrationTarget": ("incoming migrations", lambda target: target.num_tickets),
    "TicketRegistry": ("tickets", lambda registry: len(registry._tickets)),
    "BlockImport": ("held imports", lambda held: not held.released),
    "PinnedBlocks": ("pins", lambda pinned: bool(pinned.reservation.blocks)),
}


def slow_down(seconds: float) -> None:
    """Has a model wait before each step."""
    from gpu_worker.running.model_runner import ModelRunner

    run = ModelRunner.run

    def run_later(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return run(self, *args, **kwargs)

    ModelRunner.run = run_later  # type: ignore[method-assign]  # this process is a test's


def tell_other_port(port: int, file: Path) -> None:
    """Has a worker name this port for blocks."""
    from gpu_worker.migration.blocks.block_listener import BlockListener

    listen = BlockListener.__init__

    def listen_behind(self: BlockListener, *args: Any, **kwargs: Any) -> None:
        listen(self, *args, **kwargs)
        replace_text(file, str(self.port))
        self.port = port

    BlockListener.__init__ = listen_behind  # type: ignore[method-assign]  # this process is a test's


def replace_text(file: Path, text: str) -> None:
    """Writes a file so that whoever reads it finds all of the text or nothing."""
    partial = file.with_name(f"{file.name}.part")
    partial.write_text(text)
    partial.replace(file)


if __name__ == "__main__":
    main()
