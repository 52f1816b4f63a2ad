"""A small service in one process and one event loop: real routers and workers on free ports, one store in memory."""

import asyncio
import functools
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from typing import Any

import grpc
import pytest
from effort import patience
from live.oracle import Oracle

from gpu_worker.serving.process.listener import Listener
from gpu_worker.serving.process.worker import Worker
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.client import AsyncClient
from octavo.request.ids import Incarnation, new_incarnation
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings
from octavo.store.memory import MemoryState, MemoryStore
from octavo.text.tokenizers import byte_tokenizer
from octavo.v1 import admin_pb2_grpc, inference_pb2_grpc
from octavo.wire.channel import open_channel
from router.fleet import worker_link, worker_pool, worker_streams
from router.fleet.model_registry import ModelRegistry, WorkerFacts
from router.placing import dispatcher
from router.router import Router
from router.streaming.request_preparer import RequestPreparer

SECRET = b"s" * 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
PROMPT = list(range(3, 40))
LEASE_MS = 5000  # a busy machine may stop the one event loop for a second
KILLED_LEASE_MS = 500  # what is left of it when a worker is killed


class TupleOracle(Oracle):
    """Computes the outputs that a FakeRunner gives for a request: (tokens, text, finish reason) of each branch."""

    def outputs(self, prompt: Sequence[int], params: SamplingParams) -> list[tuple[tuple[int, ...], str, FinishReason]]:
        return [(each.token_ids, each.text, each.finish_reason) for each in super().outputs(prompt, params)]

    @staticmethod
    def returned(completion: Any) -> list[tuple[tuple[int, ...], str, FinishReason]]:
        """The same of each output of a completion."""
        return [(tuple(o.token_ids), o.text, o.finish_reason) for o in completion.outputs]

    async def check_completions(self, completions: Sequence[Awaitable[Any]], params: SamplingParams = GREEDY) -> None:
        """Compares the completions of the requests that `World.streams` has begun."""
        for i, completion in enumerate(await asyncio.gather(*completions)):
            assert self.returned(completion) == self.outputs([*PROMPT, i], params)


class World:
    """Routers, workers, their stores, and clients of them."""

    def __init__(self) -> None:
        self.state = MemoryState()
        self.stack = AsyncExitStack()
        self.workers: list[Worker] = []
        self.routers: list[Router] = []
        self.runners: list[object] = []

    # Building

    async def worker(
        self, runner: object = None, store: object = None, tracer: object = None, **settings: object
    ) -> Worker:
        runner = runner or FakeRunner(step_s=0.001)
        name = f"worker-{len(self.runners)}"
        made_settings = WorkerSettings(
            listen="127.0.0.1:0", web_listen="127.0.0.1:0", worker_id=name, **{"lease_ms": LEASE_MS, **settings}
        )
        listener = Listener(made_settings)
        await listener.open()
        made = Worker(made_settings, listener, store or MemoryStore(self.state), runner, tracer)
        made.start()
        self.workers.append(made)
        self.runners.append(runner)
        self.stack.push_async_callback(self._stop_worker, made)
        return made

    async def router(self, store: object = None, tracer: object = None, **settings: object) -> Router:
        made = Router(
            RouterSettings(
                listen="127.0.0.1:0",
                admin_listen="127.0.0.1:0",
                http_listen="127.0.0.1:0",
                web_listen="127.0.0.1:0",
                **{"lease_ms": LEASE_MS, "grace_ms": 1000, **settings},
            ),
            store or MemoryStore(self.state),
            SECRET,
            new_incarnation(),
            tracer=tracer,
        )
        await made.start()
        self.routers.append(made)
        self.stack.push_async_callback(self._stop_router, made)
        return made

    async def start(
        self,
        workers: int | Sequence[Any] = 1,
        routers: int = 1,
        *,
        step_s: float = 0.001,
        router: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Router:
        """Builds workers, of these runners or so many, and routers with the settings of `router`; the last of them."""
        runners = [FakeRunner(step_s=step_s) for _ in range(workers)] if isinstance(workers, int) else workers
        for runner in runners:
            await self.worker(runner, **settings)
        for _ in range(routers):
            await self.router(**router or {})
        await self.ready()
        return self.routers[-1]

    def hurry(self) -> None:
        """What runs need not go on for long: steps take no time from now on."""
        for runner in self.runners:
            runner.step_s = 0.0

    async def ready(self) -> None:
        """Waits until every router may give sequences to every worker."""
        living = {worker.listener.incarnation for worker in self.workers}
        await self.until(
            lambda: all(
                {view for view, link in router.pool.links.items() if link.view().available} >= living
                for router in self.routers
            )
        )

    def client(self, *routers: int) -> AsyncClient:
        made = AsyncClient([self.routers[index].endpoint for index in routers or range(len(self.routers))])
        self.stack.push_async_callback(made.close)
        return made

    async def streams(self, client: AsyncClient, count: int, params: SamplingParams = GREEDY) -> list[asyncio.Task]:
        """Begins `count` requests and returns the tasks of their completions."""
        tasks = [asyncio.create_task(client.complete([*PROMPT, i], params, request_id=f"s{i}")) for i in range(count)]
        await self.until(lambda: sum(len(e.journals[0]) > 3 for e in self.entries) == count)
        return tasks

    async def abandon(self, tasks: Sequence[asyncio.Task]) -> None:
        """Ends requests that `streams` has begun."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel that is closed with the world."""
        channel = open_channel(address)
        self.stack.push_async_callback(channel.close)
        return channel

    def stub(self, router: int = 0) -> inference_pb2_grpc.InferenceStub:
        """Calls of a router without an SDK that goes on elsewhere."""
        return inference_pb2_grpc.InferenceStub(self.open(self.routers[router].endpoint))

    async def http(
        self,
        endpoint: str,
        path: str,
        body: object = None,
        *,
        method: str = "GET",
        context: ssl.SSLContext | None = None,
        **headers: str,
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of one HTTP request, whose body and answer may be JSON."""

        def ask() -> tuple[int, dict[str, str], Any]:
            secure = functools.partial(http.client.HTTPSConnection, context=context)
            with closing((secure if context else http.client.HTTPConnection)(endpoint, timeout=30)) as connection:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                if body is not None:
                    named = {"content-type": "application/json", **named}
                connection.request(method, path, None if body is None else json.dumps(body), named)
                answer = connection.getresponse()
                data, found = answer.read(), {name.lower(): value for name, value in answer.getheaders()}
                return answer.status, found, json.loads(data) if data.startswith(b"{") else data

        return await asyncio.to_thread(ask)

    def admin_endpoint(self, router: int = 0) -> str:
        return json.loads(self.routers[router].lease.member.info)["admin_endpoint"]

    def admin(self, router: int = 0) -> admin_pb2_grpc.AdminStub:
        return admin_pb2_grpc.AdminStub(self.open(self.admin_endpoint(router)))

    # Breaking

    async def kill(self, worker: Worker) -> None:
        """Makes a worker look like a killed process: it does not listen, journals nothing, and its lease ends soon."""
        self.workers.remove(worker)
        worker.lease._ended = True
        for task in (worker._journalling, *worker._watching):
            task.cancel()
        await worker.listener.close(0)
        await asyncio.to_thread(worker.engine.stop)
        self.state.renew_lease(worker.listener.incarnation, KILLED_LEASE_MS)

    async def _stop_worker(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.remove(worker)
            await worker.stop()

    async def stop_router(self, router: Router) -> None:
        self.routers.remove(router)
        await router.stop()

    async def _stop_router(self, router: Router) -> None:
        if router in self.routers:
            await self.stop_router(router)

    # Looking

    async def until(self, holds: Callable[[], object], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(patience(timeout_s)):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    @property
    def entries(self) -> list:
        """The records and the journals of all requests."""
        return list(self.state._entries.values())

    def entry(self, request_id: str) -> object:
        """The record and the journals of a request."""
        return next(e for e in self.entries if e.record.request_id == request_id)

    async def until_nothing_left(self) -> None:
        """Waits until requests that have ended have left nothing behind.

        An answer, or a client that leaves, may be faster than a worker's reply to the assignment.
        """
        for router in self.routers:
            await self.until(lambda router=router: not (len(router.sessions) or router.assigner._in_progress))
            for link in router.pool.links.values():
                assert link.pending_dispatches.num_tokens >= 0


@pytest.fixture
def oracle() -> TupleOracle:
    return TupleOracle("fake")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens waits that matter in production and only cost time here."""
    monkeypatch.setattr(worker_pool, "DISCOVER_S", 0.02)
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.02)
    monkeypatch.setattr(worker_link, "UNUSABLE_S", 0.1)
    monkeypatch.setattr(worker_streams, "WATCH_MS", 50)
    monkeypatch.setattr(worker_streams, "RESYNC_S", 0.02)
    monkeypatch.setattr(dispatcher, "CLAIM_MS", 200)
    monkeypatch.setattr(dispatcher, "SWEEP_S", 0.1)


@pytest.fixture
def hello() -> Callable[..., WorkerFacts]:
    """Makes what a worker says of itself; keyword arguments change it."""

    def make(incarnation: str, **different: object) -> WorkerFacts:
        usual = {
            "worker_id": "worker-0",
            "incarnation": Incarnation(incarnation),
            "model": "name",
            "fingerprint": "weights",
            "layout": "bfloat16",
            "block_size": 16,
            "num_blocks": 10,
            "context_tokens": 100,
            "vocab_size": 256,
            "tokenizer": byte_tokenizer.NAME,
            "eos_token_ids": (),
            "max_batch_tokens": 10,
            "max_batch_sequences": 1,
            "device": "cpu",
        }
        return WorkerFacts(**{**usual, **different})

    return make


@pytest.fixture
def make_preparer(hello: Callable[..., WorkerFacts]) -> Callable[..., Awaitable[RequestPreparer]]:
    """Makes the preparer of a router that knows one worker; keyword arguments change what that says of itself."""

    async def make(**different: object) -> RequestPreparer:
        models = ModelRegistry()
        await models.add_worker(hello("w", **different))
        return RequestPreparer(models, Incarnation("router"))

    return make


@pytest.fixture
def make_world() -> type[World]:
    return World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with made.stack:
        yield made
