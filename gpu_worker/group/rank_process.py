"""A rank as a process of this host, and what its front reads of ranks wherever they are."""

import io
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, cast

from gpu_worker.group.rank_task import RankTask
from octavo.process.launcher import launched


class WordSource(Protocol):
    """Where the words of some ranks come from: a process of one rank, or a host of several. One thread uses it."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def start(self) -> None:
        """Called first. Raises OSError."""
        ...

    def fileno(self) -> int: ...

    def read(self) -> bytes:
        """Of what has come. Empty: nothing comes any more."""
        ...

    def beat(self) -> None:
        """Tells the other side that the front lives, if it would not see by itself that it does not."""
        ...

    def ending(self) -> str:
        """How it has ended, once nothing comes any more."""
        ...

    def kill(self) -> None:
        """Ends the ranks, from any thread."""
        ...


class RankProcess:
    """A rank on this host. It dies with the thread that starts it (launcher.py)."""

    def __init__(self, task: RankTask) -> None:
        self.ranks = [task.rank]
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """0 before its start."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        task, safe_path = self._task, ["-P"] if sys.flags.safe_path else []
        self._process = subprocess.Popen(
            launched([sys.executable, *safe_path, "-m", "gpu_worker.group.rank", task.to_json()]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=task.descriptors,
        )

    def fileno(self) -> int:
        return self._words.fileno()

    def read(self) -> bytes:
        return self._words.read1()

    def beat(self) -> None:
        """Does nothing: the kernel ends it with the front."""

    def ending(self) -> str:
        status = self._started.wait()
        self._words.close()
        if -status == signal.SIGKILL:
            return "killed by signal 9: by the kernel for want of memory, if nobody else did that"
        return f"killed by signal {-status}" if status < 0 else f"it ended with status {status}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def reap(self, most_s: float) -> None:
        """After `kill`: leaves no zombie. Who would inherit it where this process ends may reap nothing."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(most_s)

    @property
    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RuntimeError("a rank is read before its start")
        return self._process

    @property
    def _words(self) -> io.BufferedReader:
        return cast("io.BufferedReader", self._started.stdout)
