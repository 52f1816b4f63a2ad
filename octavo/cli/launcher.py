"""Becomes another program that dies with its parent: python launcher.py PARENT_PID PROGRAM ARGS...

Variables to add to the environment come as NAME=VALUE lines on stdin: unlike argv, nobody else can read them.
Run as a script in a Python without site-packages (a few milliseconds), because the same calls between fork and exec of
a program with threads, as gRPC has, can deadlock. The kernel's PR_SET_PDEATHSIG survives exec. It means the death of
the *thread* that started this process: start it from the main thread. Linux only; elsewhere a parent killed with
SIGKILL leaves its children behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, program = int(arguments[0]), arguments[1:]
    for line in sys.stdin:
        name, _, value = line.rstrip("\n").partition("=")
        os.putenv(name, value)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
