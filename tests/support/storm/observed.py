"""Runs a module as a program that tells how many tasks it has: python -m storm.observed FILE MODULE ARGS...

At SIGUSR1 it writes the number of asyncio tasks and their names to FILE as JSON. Threads and open files are in /proc.
"""

import asyncio
import json
import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType


def main() -> None:
    target = Path(sys.argv[1])

    def tell(signum: int, frame: FrameType | None) -> None:
        try:
            tasks = asyncio.all_tasks()
        except RuntimeError:  # no loop runs yet
            tasks = set()
        names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
        partial = target.with_suffix(".part")
        partial.write_text(json.dumps({"pid": os.getpid(), "tasks": len(tasks), "names": dict(names)}))
        partial.replace(target)

    signal.signal(signal.SIGUSR1, tell)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
