"""What a test of the page compares it with: every view that a router has made, and requests that never stop coming."""

import asyncio
import random
import threading
import time
from types import TracebackType
from typing import Self

import grpc
from live.cluster import Cluster

from octavo.client import AsyncClient, SamplingParams
from octavo.request.errors import ServingError
from octavo.v1 import admin_pb2


class ViewLog:
    """Watches a router from a thread, so often that whoever else watches it is shown the same views."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._views: dict[int, admin_pb2.WatchClusterResponse] = {}
        self._ended = False
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def find(self, at_ms: int) -> admin_pb2.WatchClusterResponse | None:
        """The view of that moment of the router's life, if there was one."""
        return self._views.get(at_ms)

    def _watch(self) -> None:
        while not self._ended:
            try:
                self._call = self._cluster.admin().WatchCluster(admin_pb2.WatchClusterRequest(interval_ms=200))
                for view in self._call:
                    self._views[view.up_ms] = view
            except grpc.RpcError:
                time.sleep(0.05)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended = True
        if self._call is not None:
            self._call.cancel()
        self._thread.join(20)


class Load:
    """So many requests at a time, from another thread."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster = cluster
        self._count = count
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True)

    async def _send(self) -> None:
        async with AsyncClient(self._cluster.endpoints) as client:
            tasks = [asyncio.create_task(self._repeat(client, number)) for number in range(self._count)]
            await asyncio.to_thread(self._ended.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, client: AsyncClient, number: int) -> None:
        rng = random.Random(number)
        prefix = [3 + rng.randrange(200) for _ in range(64)]
        while True:
            prompt = [*prefix, *(3 + rng.randrange(200) for _ in range(20))]
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(300, 900), ignore_eos=True)
            try:
                await client.complete(prompt, params)
            except ServingError:
                await asyncio.sleep(0.1)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(60)
