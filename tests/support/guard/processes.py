"""The processes below a process, read from /proc, and those that a fixture keeps for longer than one test."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
HELPERS = ("octavo/text/template_process.py", "octavo/pictures/reader_process.py")  # which programs keep
_lasting: list[Callable[[], Iterable[int]]] = []


def state_of(pid: int) -> str:
    """The letter of proc(5): R, S, D, T, Z; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def exists(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def command_of(pid: int) -> str:
    """Its program and arguments, in one line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below it, zombies included, whichever of its threads has started them."""
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):  # pathlib would take as long as a small test, twice for each test
            with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    return [below for child in children for below in (child, *descendants(child))]


def name_of(pid: int) -> str:
    """What the process calls itself; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ranks_of(pid: int) -> list[int]:
    """The ranks that the front of a group has started, also those that still load, and those that were forked."""
    module = "gpu_worker.group.rank"
    return [each for each in descendants(pid) if module in command_of(each) or module.endswith(name_of(each) or "?")]


@contextmanager
def lasting(pids: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Inside this context the processes named by `pids()` may outlive the test that has started them."""
    _lasting.append(pids)
    try:
        yield
    finally:
        _lasting.remove(pids)


def forever(pids: Iterable[int]) -> None:
    """These may live until the test run ends."""
    kept = set(pids)
    _lasting.append(lambda: kept)


def all_lasting() -> set[int]:
    """Ids of the processes of all contexts of `lasting`, and of those below them.

    Also of the processes in which chat templates run and pictures are read: a program keeps them for the next chat.
    """
    roots = {pid for pids in _lasting for pid in pids()}
    roots |= {pid for pid in descendants(os.getpid()) if command_of(pid).endswith(HELPERS)}
    return roots.union(*(descendants(pid) for pid in roots))
