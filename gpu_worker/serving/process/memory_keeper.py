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
import mmap
import os
import signal
import threading

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


def keep_memory_for_last() -> None:
    """Starts a keeper of this process's memory. Does nothing where the system or the C library lacks what it needs."""
    try:
        reading, writing = os.pipe()  # `writing` is closed with all files of this process, and not before
    except OSError:  # there are as many files as may be
        return
    is_ready = threading.Event()
    keeping = threading.Thread(target=_keep, args=(reading, is_ready), name="memory keeper", daemon=True)
    try:
        keeping.start()
    except RuntimeError:  # there are as many threads as may be
        os.close(writing)
    else:
        is_ready.wait()
    os.close(reading)


def _keep(reading: int, is_ready: threading.Event) -> None:
    """Starts the keeper, and waits for it: for as long as this process lives, unless somebody kills the keeper."""
    stack, buffer = mmap.mmap(-1, STACK_BYTES), ctypes.create_string_buffer(BUFFER_BYTES)
    try:
        keeper = _start(reading, stack, buffer)
    except (AttributeError, OSError):  # no Linux, a C library before 2.34, or what it needs is denied
        keeper = -1
    finally:
        is_ready.set()
    if keeper > 0:
        os.waitpid(keeper, WAIT_ALL)


def _start(reading: int, stack: mmap.mmap, buffer: "ctypes.Array[ctypes.c_char]") -> int:
    """The keeper's process id; negative: there is none. From here on this thread has no file but `reading`."""
    library = ctypes.CDLL(None)
    # It holds no lock while it waits: whoever flushes all files of C, as `exit` does, takes each one's.
    clone, getc, fdopen = library.clone, library.getc_unlocked, library.fdopen
    os.nice(LESS_URGENT)  # of this thread and of the keeper: whoever takes over comes first
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # the keeper ends when this process has ended
    library.prctl(PR_SET_NAME, KEEPER_NAME.encode(), 0, 0, 0)
    if library.close_range(ctypes.c_uint(reading + 1), LAST_FILE, CLOSE_RANGE_UNSHARE):
        return -1  # a keeper with files would keep connections
    if reading:
        library.close_range(ctypes.c_uint(0), ctypes.c_uint(reading - 1), 0)
    fdopen.restype = ctypes.c_void_p
    pipe = ctypes.c_void_p(fdopen(reading, b"r"))
    library.setvbuf(pipe, buffer, FULLY_BUFFERED, ctypes.c_size_t(BUFFER_BYTES))
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + STACK_BYTES
    keeper: int = clone(ctypes.cast(getc, ctypes.c_void_p), ctypes.c_void_p(top), CLONE_VM, pipe)
    return keeper
