"""The process in which chat templates run, one after another, each with limits of time, memory and text.

`octavo.text.template_renderer` starts this file as a script and talks with it over a socket, its descriptor 0. First
comes a line with the folders to import from. A request is a head and a JSON object: `key` names a template, `source`
and `variables` are there when the process has not compiled it yet, `values` when it is to be rendered. The answer is a
kind, whether the process is still fit for more, a length, and a text. A template that takes too long, or too much
memory, ends the process.
"""

import json
import os
import resource
import signal
import struct
import sys

HEAD = struct.Struct("!QQQd")  # bytes of the request, bytes of memory, bytes of text, seconds of a processor
ANSWER = struct.Struct("!c?Q")
TEXT, TEMPLATE_ERROR, TOO_LONG = b"t", b"e", b"l"
OUT_OF_MEMORY = 77  # exit status
SPARE = 32 << 20  # bytes of memory that a template may leave behind
MAX_ERROR = 500  # characters of an error's text


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    socket = os.fdopen(0, "rb")
    sys.path[:] = json.loads(socket.readline())

    from octavo.text.template_sandbox import TemplateTable, message_of

    templates, before = TemplateTable(), memory_in_use()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    while head := socket.read(HEAD.size):
        length, memory, max_text, seconds = HEAD.unpack(head)
        limit = before + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        kind = TEXT
        try:
            try:
                text = templates.answer(json.loads(socket.read(length)))
            except MemoryError:
                raise
            except Exception as error:  # a template can raise whatever an expression can
                kind, text = TEMPLATE_ERROR, message_of(error)[:MAX_ERROR]
            data = text.encode("utf-8", "surrogatepass") if len(text) <= max_text else b""
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > max_text or len(data) > max_text:
            kind, data = TOO_LONG, b""
        del text
        is_fit = memory_in_use() - len(data) < before + SPARE
        send(ANSWER.pack(kind, is_fit, len(data)) + data)
    os._exit(0)  # nobody asks any more; nothing is left to be written


def memory_in_use() -> int:
    """The bytes that RLIMIT_AS counts."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def send(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(0, left) :]


if __name__ == "__main__":
    main()
