"""A killed process closes its connections before its memory is freed."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpu_worker.serving.process.memory_keeper import KEEPER_NAME

NUM_BYTES = 64 << 20
PROGRAM = f"""
import ctypes, socket, sys, time
from gpu_worker.serving.process.memory_keeper import keep_memory_for_last
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
keep_memory_for_last()
ctypes.CDLL(None).fflush(None)  # it takes the locks of all files, as `exit` does with some C libraries
later = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
memory = b"x" * {NUM_BYTES}
later.sendall(b"ready")
time.sleep(float(sys.argv[2]))
"""

DENIED = """
import ctypes, logging, sys, threading
from gpu_worker.serving.process import memory_keeper
logging.basicConfig(level=logging.INFO)
NUMBER, FLAGS, CLONE_THREAD = 0, 16, 0x10000  # places of a call's number and of its first argument
LOAD, EQUAL, SET, RETURN, ALLOW, DENY = 0x20, 0x15, 0x45, 0x06, 0x7fff0000, 0x00050001
steps = {
    "clone": [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 3, 56), (LOAD, 0, 0, FLAGS), (SET, 1, 0, CLONE_THREAD)],
    "close_range": [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, 436)],
}[sys.argv[1]] + [(RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
class Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint32)]
class Steps(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("first", ctypes.POINTER(Step))]
program = Steps(len(steps), (Step * len(steps))(*(Step(*each) for each in steps)))
library = ctypes.CDLL(None, use_errno=True)
if library.prctl(38, 1, 0, 0, 0) or library.prctl(22, 2, ctypes.byref(program), 0, 0):
    raise OSError(ctypes.get_errno(), "seccomp")
memory_keeper.keep_memory_for_last()
thread = threading.Thread(target=print, args=("goes on",))
thread.start()
thread.join()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such calls")


class Kept:
    """A process with a keeper, and both of its connections."""

    def __init__(self, seconds: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-c", PROGRAM, str(server.getsockname()[1]), str(seconds)]
            self.process = subprocess.Popen(command)
            self.connections = [server.accept()[0] for _ in range(2)]
        assert self.connections[1].recv(5, socket.MSG_WAITALL) == b"ready"
        [self.keeper] = psutil.Process(self.process.pid).children()

    def end(self) -> None:
        for each in self.connections:
            each.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(60)
    yield made
    made.end()


def wait_until(is_true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_connections_break_while_the_memory_is_still_there(kept):
    kept.keeper.suspend()  # it would free the memory a moment later
    kept.process.kill()
    for each in kept.connections:
        each.settimeout(30)
        assert each.recv(1) == b""
    kept.process.wait(30)
    assert kept.keeper.memory_info().rss > NUM_BYTES
    kept.keeper.resume()
    wait_until(lambda: has_ended(kept.keeper))


def test_the_keeper_has_a_name_one_file_and_no_signal_ends_it(kept):
    assert kept.keeper.name() == KEEPER_NAME
    assert kept.keeper.nice() > psutil.Process(kept.process.pid).nice()
    [file] = Path(f"/proc/{kept.keeper.pid}/fd").iterdir()
    assert os.readlink(file).startswith("pipe:")
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        kept.keeper.send_signal(each)
    kept.process.kill()
    kept.process.wait(30)
    wait_until(lambda: has_ended(kept.keeper))


def test_a_process_that_ends_by_itself_takes_the_keeper_along():
    kept = Kept(0)
    keeper = kept.keeper
    assert kept.process.wait(30) == 0
    wait_until(lambda: has_ended(keeper))
    kept.end()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of calls are those of x86-64")
@pytest.mark.parametrize("call", ["clone", "close_range"])
def test_where_a_sandbox_denies_it_the_process_goes_on_and_says_so(call):
    """A filter of the kernel (seccomp) denies the call; threads are made as ever."""
    found = subprocess.run([sys.executable, "-c", DENIED, call], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "goes on\n"
    assert re.search(rf"no process keeps the memory, .*: .*{call}: Operation not permitted", found.stderr)


def test_a_process_outlives_its_keeper(kept):
    kept.keeper.kill()
    wait_until(lambda: not psutil.Process(kept.process.pid).children())
    assert kept.process.poll() is None
