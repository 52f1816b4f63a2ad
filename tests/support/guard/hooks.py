"""Hooks of pytest: no process outlives the test that started it, and no test outlives its time limit for long.

A conftest.py that wants them imports them by name.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from guard import unpickling
from guard.processes import PR_SET_CHILD_SUBREAPER, all_lasting, command_of, descendants, exists
from guard.watchdog import Watchdog, kill

watchdog_key = pytest.StashKey[Watchdog]()
running_key = pytest.StashKey[set[int]]()
failed_key = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "kill_after", "seconds past its time limit, when the processes a test has started are killed", default="20"
    )
    parser.addini("end_after", "seconds after that, when the test run ends", default="100")


def pytest_configure(config: pytest.Config) -> None:
    """Signals are what they are in a terminal, however pytest was started; orphans become children of this process.

    No pickle is loaded that could run code.
    """
    unpickling.install()
    # Ctrl-C inside a hook of pytest is told by a warning, which as an error would hide it: "INTERNALERROR".
    config.addinivalue_line("filterwarnings", "ignore::pluggy.PluggyTeardownRaisedWarning")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `nohup make test &` in a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end_in_order)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    kill_after_s, end_after_s = (float(config.getini(name)) for name in ("kill_after", "end_after"))
    stderr = os.dup(2)
    config.stash[watchdog_key] = Watchdog(kill_after_s, end_after_s, stderr)
    os.close(stderr)


def _end_in_order(signum: int, frame: FrameType | None) -> None:
    pytest.exit("ended by SIGTERM", returncode=128 + signum)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """pytest-timeout begins to count: so does the watchdog."""
    item.config.stash[watchdog_key].begin(item.nodeid, settings.timeout, item.stash[running_key])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around everything that a test does. Ctrl-C and SIGTERM leave here, past the hook for teardowns."""
    item.stash[running_key] = set(descendants(os.getpid()))
    try:
        return (yield)
    except BaseException:
        kill(_started_by(item))
        raise
    finally:
        item.config.stash[watchdog_key].end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[failed_key] = item.stash.get(failed_key, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """After all fixtures: processes that the test has left are killed, and that fails a test that had passed."""
    failed = item.stash[failed_key]
    try:
        result = yield
    except BaseException:
        failed = True
        raise
    finally:
        item.config.hook.pytest_timeout_cancel_timer(item=item)  # it may strike no more
        left = _left_by(item)
        names = [f"{pid} {command_of(pid)}" for pid in left]
        kill(left)
        if left:
            item.add_report_section("teardown", "processes", "\n".join(["killed, as the test had left them:", *names]))
    if left and not failed:
        pytest.fail(
            "the test has left processes behind, which are killed now:\n  "
            + "\n  ".join(names)
            + "\nA fixture that keeps processes for longer than a test names them with guard.processes.lasting().",
            pytrace=False,
        )
    return result


def _left_by(item: pytest.Item) -> list[int]:
    """Running processes that the test has started. A test that has passed may leave some that are about to end."""
    patience_s = 0.0 if item.stash[failed_key] else float(item.config.getini("kill_after")) / 2
    until = time.monotonic() + patience_s
    while left := _started_by(item):
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    return left


def _started_by(item: pytest.Item) -> list[int]:
    started = [pid for pid in descendants(os.getpid()) if pid not in item.stash[running_key] and exists(pid)]
    spared = all_lasting() if started else set()
    return [pid for pid in started if pid not in spared]


def pytest_enter_pdb(config: pytest.Config) -> None:
    """A person looks at the test and has all the time in the world."""
    config.stash[watchdog_key].end()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The watchdog stays: interpreters have been known to hang at their end, behind a thread.

    A worker of pytest-xdist then waits for the other workers, and the main process ends it.
    """
    if hasattr(session.config, "workerinput"):
        return
    limit_s = float(session.config.getini("timeout") or 0.0)
    session.config.stash[watchdog_key].begin("the end of the test run", limit_s, ())
