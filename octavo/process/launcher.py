"""Turns this process into a program that dies with its parent: python launcher.py PARENT_PID PROGRAM ARGS...

Variables to add to the environment come as NAME=VALUE lines on stdin: unlike argv, other users cannot read them. The
launcher runs as a script in a Python without site-packages (a few milliseconds), because the same calls between fork
and exec can deadlock in a process with threads, such as those of gRPC. The kernel's PR_SET_PDEATHSIG survives exec. It
sends its signal at the death of the *thread* that started the process, so start children from the main thread. It
exists on Linux only: elsewhere a parent that is killed with SIGKILL leaves its children behind.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1


def launched(command: Iterable[str]) -> list[str]:
    """The command line that starts `command` so that it dies with this process. It first reads stdin to its end."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    for line in sys.stdin:
        name, _, value = line.rstrip("\n").partition("=")
        os.putenv(name, value)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
