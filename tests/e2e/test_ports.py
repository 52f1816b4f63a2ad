"""A router and a worker listen where the table of operations.md says, and nowhere else."""

import re
import sys
from pathlib import Path

import pytest
from listening import listening
from live.cluster import ROOT, StoreProcess
from live.process import Process, wait_until

from octavo.local import ports
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings

ROW = re.compile(r"\| (router|worker)(?: `(--[a-z-]+)`| for blocks) \| ([^|]+?) \|")
MODULES = {"router": "router", "worker": "gpu_worker"}
SERVES = {"router": " listens on ", "worker": "this worker serves"}
BLOCKS = "a free port"


def table() -> dict[str, dict[str, str]]:
    """What operations.md says of each program: the default of each flag, and where blocks come to."""
    page = (ROOT / "docs/operations.md").read_text().partition("\n## Ports\n")[2].partition("\n## ")[0]
    found: dict[str, dict[str, str]] = {"router": {}, "worker": {}}
    for program, flag, where in ROW.findall(page):
        found[program][flag] = where.partition(" (")[0]
    return found


@pytest.fixture
def store(tmp_path: Path):
    made = StoreProcess(tmp_path / "store")
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("cls", [RouterSettings, WorkerSettings])
def test_the_table_has_the_listeners_and_defaults_of_the_code(cls):
    said = {flag: where for flag, where in table()[cls.program].items() if flag}
    settings = cls()
    listeners = [name for name in vars(type(settings)) if name.endswith("listen")]
    assert said == {f"--{name.replace('_', '-')}": getattr(settings, name) for name in listeners}


@pytest.mark.parametrize("program", ["router", "worker"])
def test_a_program_listens_where_the_table_says(program, store, tmp_path):
    flags = [flag for flag in table()[program] if flag]
    free = ports.pick(len(flags))
    given = [f"{flag}=127.0.0.1:{port}" for flag, port in zip(flags, free, strict=True)]
    command = [sys.executable, "-m", MODULES[program], "--store", store.url, *given]
    command += ["--runner", "fake"] if program == "worker" else []
    process = Process(program, command, tmp_path / "log", ROOT)
    process.start()
    try:
        wait_until(lambda: SERVES[program] in process.tail() or not process.running, 90, process.tail())
        found = listening(process.pid)
    finally:
        process.stop()
    expected = {("127.0.0.1", port) for port in free}
    assert expected <= found
    more = found - expected
    assert len(more) == (table()[program].get("") == BLOCKS), more
    assert {address for address, _ in more} <= {"127.0.0.1"}
