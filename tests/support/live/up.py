"""A running `octavo up`, and the other commands beside it."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from guard.processes import descendants, exists, name_of
from live.cluster import ROOT
from live.process import Process, wait_until

from gpu_worker.serving.process.memory_keeper import KEEPER_NAME
from octavo.cli import main

STOP_S = 40.0


class Up:
    """One that is ready. `folder` is where its log goes; options may be numbers and paths. Without a `form` it says how
    to talk to it, as to a person."""

    def __init__(
        self,
        folder: Path,
        *options: object,
        state_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        form: str = "--json",
    ) -> None:
        self.state_dir = state_dir or folder / "state"
        log = folder / f"up-{len(list(folder.iterdir()))}.log"
        command = self._command("up", "--grpc-port", 0, *options, form=form)
        self.process = Process("up", command, log, ROOT, environment)
        self.process.start()
        try:
            wait_until(self._ready, 120, "octavo up is not ready")
        except BaseException:
            self.process.stop(0)
            raise

    def _command(self, *words: object, form: str = "--json") -> list[str]:
        state = ["--state-dir", str(self.state_dir), *filter(None, [form])]
        return [sys.executable, "-m", "octavo.cli", *map(str, words), *state]

    def _ready(self) -> bool:
        assert self.process.running, self.process.tail()
        text = self.process.log.read_text()
        return '"ready": true' in text or text.endswith("Ctrl-C ends everything.\n")

    def run(self, *words: object) -> Any:
        """What another command prints, as JSON."""
        done = self.try_to(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def try_to(self, *words: object, form: str = "--json") -> subprocess.CompletedProcess[str]:
        command, env = self._command(*words, form=form), self.process.environment
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env, timeout=60)

    def status(self) -> Any:
        """Asked in this process: a test asks many times, and a command takes longer to start than to answer."""
        with redirect_stdout(io.StringIO()) as told, redirect_stderr(io.StringIO()):
            if main(["status", "--json", "--state-dir", str(self.state_dir)]):
                return None
        return json.loads(told.getvalue())

    def children(self) -> list[int]:
        """All processes that it has started, and those that these have."""
        return descendants(self.process.pid)

    def programs(self) -> list[int]:
        """Of these, the store, routers and workers."""
        return [pid for pid in self.children() if name_of(pid) != KEEPER_NAME]

    def stop(self) -> int:
        """Its status; nothing that it has started is left."""
        children = self.children()
        code = self.process.stop(STOP_S)
        wait_until(lambda: not any(map(exists, children)), STOP_S, f"of processes {children} some are left")
        return code


@contextmanager
def running_up(folder: Path, *options: object, **more: Any) -> Iterator[Up]:
    made = Up(folder, *options, **more)
    try:
        yield made
    finally:
        made.stop()
