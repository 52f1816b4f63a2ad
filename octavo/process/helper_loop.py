"""What a helper process does: it answers requests one after another, each with limits of time, memory and answer.

`octavo.process.helper_process` starts a script and talks with it over a socket, its descriptor 0. First comes a line
with the folders to import from, which the script reads itself. A request is a head and its bytes; the answer is a kind,
whether the process is still fit for more, a length, and its bytes. What takes too long, or too much memory, ends the
process.
"""

import os
import resource
import signal
import struct
from collections.abc import Callable
from typing import BinaryIO

HEAD = struct.Struct("!QQQd")  # bytes of the request, bytes of memory, bytes of the answer, seconds of a processor
ANSWER = struct.Struct("!c?Q")
DONE, REFUSED, TOO_LONG = b"t", b"e", b"l"
OUT_OF_MEMORY = 77  # exit status
SPARE = 32 << 20  # bytes of memory that a request may leave behind
MAX_ERROR = 500  # characters of an error's text


def prepare() -> None:
    """Before anything else is imported: its limits can end the process, which leaves no file."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(socket: BinaryIO, answer: Callable[[bytes], bytes], message_of: Callable[[Exception], str] = str) -> None:
    """Answers until nobody asks any more. What `answer` raises is a refusal, with the text that `message_of` makes."""
    prepare()
    before = memory_in_use()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    while head := socket.read(HEAD.size):
        length, memory, most, seconds = HEAD.unpack(head)
        limit = before + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        kind = DONE
        try:
            try:
                data = answer(socket.read(length))
            except MemoryError:
                raise
            except Exception as error:  # a request can make it raise whatever it likes
                kind, data = REFUSED, message_of(error)[:MAX_ERROR].encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(data) > most:
            kind, data = TOO_LONG, b""
        is_fit = memory_in_use() - len(data) < before + SPARE
        send(ANSWER.pack(kind, is_fit, len(data)) + data)
        del data
    os._exit(0)  # nobody asks any more; nothing is left to be written


def memory_in_use() -> int:
    """The bytes that RLIMIT_AS counts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def send(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(0, left) :]
