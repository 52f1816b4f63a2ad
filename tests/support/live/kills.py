"""kill -9 for processes of a cluster while requests run."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import grpc
from live.cluster import Cluster


class Kills:
    """From `begin` to the end of the context: one after the other, when what was killed is back.

    Each one comes while a worker computes outputs, and hits it, or a router.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        self.num_done = 0
        self._cluster = cluster
        self._names = list(names)  # the one that was killed last is the last
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises what keeps them from going on."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._kill_one()
        except BaseException as error:
            self._error = error

    def _kill_one(self) -> None:
        busy = [name for name in self._cluster.worker_endpoints if self._computes(name)]
        if not busy or self._ended.wait(0.5):
            return
        name = next((name for name in self._names if name in busy), self._names[0])
        if not any(map(self._computes, busy)):
            return
        self._cluster.kill(name)
        self.num_done += 1
        self._names.remove(name)
        self._names.append(name)
        self._cluster.spawn(name)
        self._cluster.wait_ready()

    def _computes(self, worker: str) -> bool:
        with suppress(grpc.RpcError):
            return self._cluster.load(worker).num_running > 0
        return False
