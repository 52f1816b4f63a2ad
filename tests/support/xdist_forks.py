"""Workers of pytest-xdist, and a nursery for each, begin as forks of a process that has imported what takes seconds.

xdist starts this file for each worker, with the options of an interpreter behind: it passes its descriptors to the
process that forks, and ends with the fork. Only what others wrote is imported there: our own modules are imported under
a test's eyes, where something may measure what runs.
"""

import atexit
import ctypes
import gc
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve()
MODULES = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "grpc.aio", "valkey.asyncio")
PR_SET_PDEATHSIG, MOST_BYTES = 1, 1 << 17
nursery_of_this_worker: "tuple[socket.socket, int] | None" = None  # what asks it, and its process


def start() -> str:
    """Begins to import, in a process that ends with this one. Returns what starts workers instead of `python`."""
    name = f"octavo-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}:{HERE.parent}"}
        command = [sys.executable, HERE, "serve"]
        process = subprocess.Popen(command, stdin=listener, env=environment)
    atexit.register(process.wait)
    atexit.register(process.kill)  # first
    return shlex.join([sys.executable, "-I", "-S", str(HERE), name])


def ask(name: str, code: str) -> None:
    """In the process that xdist has started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(f"\0{name}")
        socket.send_fds(asking, [json.dumps([code, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
        for stream in (0, 1):
            os.close(stream)  # the worker has them
        asking.recv(1)  # nothing comes: the worker ends


def serve() -> None:
    die_with_parent()
    listener = socket.socket(fileno=os.dup(0))
    for name in MODULES:
        import_module(name)
    for module in list(sys.modules.values()):  # pytest would warn of those whose assertions it means to rewrite
        if type(module) is ModuleType:
            module.__doc__ = f"{module.__doc__} PYTEST_DONT_REWRITE"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker here
    while True:
        asked, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(asked, MOST_BYTES, 3)
        if os.fork() == 0:
            listener.close()
            work(streams, *json.loads(message))
            return  # `asked` ends with the process
        for descriptor in streams:
            os.close(descriptor)
        asked.close()


def work(streams: list[int], code: str, folder: str, environment: dict[str, str]) -> None:
    """Turns this process into a worker, which has a nursery beside it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    global nursery_of_this_worker
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (nursery := os.fork()) == 0:
        ours.close()
        for descriptor in streams[:2]:
            os.close(descriptor)  # else the worker's end would not be seen
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if theirs.recv(1, socket.MSG_PEEK):  # the worker needs it, and has not ended
            import_module("live.nursery").main(theirs)
        return
    theirs.close()
    nursery_of_this_worker = ours, nursery
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    sys.modules["xdist_forks"] = sys.modules["__main__"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, main.__dict__)  # noqa: S102  it is what xdist gives an interpreter


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        ask(sys.argv[1], sys.argv[-1])
