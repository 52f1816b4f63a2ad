"""The connections of a killed process break at once, however much memory it has.

The kernel ends a process in this order: it frees the memory, which takes 20 to 300 ms, and then closes the files, and
with them the connections whose end tells others of the death. But memory that two processes share is freed by the one
that ends last. So here a second process shares it. It has no file but the end of a pipe, whose other end is a file of
the first process: when that is closed, it ends, too.

    kill -9 ─▶ this process ends: connections break ─▶ the pipe breaks ─▶ the keeper ends: memory is freed

The keeper runs no Python. It is a call of the C library that reads from the pipe, with a stack of its own and what the
C library has for the thread that started it. So that thread stays, and waits for the keeper.
"""

import ctypes
import logging
import mmap
import os
import signal
import threading
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

KEEPER_NAME = "octavo-memory"
STACK_BYTES = 64 << 10
BUFFER_BYTES = 64
LESS_URGENT = 1  # more would let the memory of a dead process stay for seconds on a busy machine
# Of Linux
CLONE_VM = 0x100
CLOSE_RANGE_UNSHARE = 2
LAST_FILE = ctypes.c_uint(0xFFFFFFFF)
PR_SET_NAME = 15
WAIT_ALL = 0x40000000  # also for a child that sends no signal when it ends
# Of C
FULLY_BUFFERED = 0


@dataclass(slots=True)
class KeeperStart:
    """What the thread that starts a keeper says when it is done. It cannot log, as it has no files any more."""

    is_done: threading.Event = field(default_factory=threading.Event)
    obstacle: str = ""  # why there is no keeper


def keep_memory_for_last() -> None:
    """Starts a keeper of this process's memory. Where system or C library lack or deny what it needs, there is none,
    which is logged: a death is noticed later then.
    """
    start = KeeperStart()
    try:
        reading, writing = os.pipe()  # `writing` is closed with all files of this process, and not before
    except OSError as error:  # there are as many files as may be
        start.obstacle = str(error)
    else:
        keeping = threading.Thread(target=_keep, args=(reading, start), name="memory keeper", daemon=True)
        try:
            keeping.start()
            start.is_done.wait()
        except RuntimeError as error:  # there are as many threads as may be
            start.obstacle = str(error)
        if start.obstacle:
            os.close(writing)
        os.close(reading)
    if start.obstacle:
        log.info("no process keeps the memory, so others notice the death of this one later: %s", start.obstacle)


def _keep(reading: int, start: KeeperStart) -> None:
    """Starts the keeper, and waits for it: for as long as this process lives, unless somebody kills the keeper."""
    try:
        stack, buffer = mmap.mmap(-1, STACK_BYTES), ctypes.create_string_buffer(BUFFER_BYTES)
        keeper = _start(reading, stack, buffer)
    except (AttributeError, OSError) as error:  # no Linux, a C library before 2.34, or what it needs is denied
        keeper, start.obstacle = -1, str(error)
    finally:
        start.is_done.set()
    if keeper > 0:
        os.waitpid(keeper, WAIT_ALL)


def _start(reading: int, stack: mmap.mmap, buffer: "ctypes.Array[ctypes.c_char]") -> int:
    """The keeper's process id. From here on this thread has no file but `reading`. Raises OSError, AttributeError."""
    library = ctypes.CDLL(None, use_errno=True)
    # It holds no lock while it waits: whoever flushes all files of C, as `exit` does, takes each one's.
    clone, getc, fdopen = library.clone, library.getc_unlocked, library.fdopen
    os.nice(LESS_URGENT)  # of this thread and of the keeper: whoever takes over comes first
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # the keeper ends when this process has ended
    library.prctl(PR_SET_NAME, KEEPER_NAME.encode(), 0, 0, 0)
    if library.close_range(ctypes.c_uint(reading + 1), LAST_FILE, CLOSE_RANGE_UNSHARE):
        raise _refused("close_range")  # a keeper with files would keep connections
    if reading:
        library.close_range(ctypes.c_uint(0), ctypes.c_uint(reading - 1), 0)
    fdopen.restype = ctypes.c_void_p
    pipe = ctypes.c_void_p(fdopen(reading, b"r"))
    library.setvbuf(pipe, buffer, FULLY_BUFFERED, ctypes.c_size_t(BUFFER_BYTES))
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + STACK_BYTES
    keeper: int = clone(ctypes.cast(getc, ctypes.c_void_p), ctypes.c_void_p(top), CLONE_VM, pipe)
    if keeper < 0:
        raise _refused("clone")
    return keeper


def _refused(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
