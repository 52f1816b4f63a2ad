"""kill -9 of routers and workers under a response: OpenAI's own package, unchanged, sees one sequence without a gap."""

import asyncio
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from chat_tokenizer import write_chat_tokenizer
from effort import draws
from lazily import lazily
from live.cluster import Cluster, Shape
from live.fixtures import running, whole
from response_events import without_names

from octavo.request.ids import RequestId, sequence_id
from octavo.store import open_store
from router.streaming.request_preparer import TENANT

openai = lazily("openai")
ASKED: dict[str, Any] = {"model": "fake", "input": "Hi", "temperature": 0, "background": True, "stream": True}
LAST = {"response.completed", "response.incomplete", "response.failed"}
CREATED = "response.created"
EVERY_S = 2.0
END_S = 300.0
MANY = 3000  # tokens

UNGUESSED = ("--speculation", "off")  # a response that was heard before would be over before anything is killed


@pytest.fixture
def shape_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Shape]:
    """So many routers whose model has a chat template, and as many workers."""
    folder = write_chat_tokenizer(tmp_path_factory.mktemp("tokenizer") / "chat")

    def of(count: int, *router_args: str) -> Shape:
        arguments = ("--tokenizer", str(folder), *router_args)
        kinds = {"runner": "fake", "step_delay_ms": 20, "router_args": arguments, "worker_args": UNGUESSED}
        return Shape(routers=count, workers=count, **kinds)

    return of


@pytest.fixture
def cluster(clusters: Callable[[Shape], Cluster], shape_of: Callable[..., Shape]) -> Iterator[Cluster]:
    yield from whole(clusters(shape_of(2)))


@pytest.fixture
def spares(tmp_path_factory: pytest.TempPathFactory, shape_of: Callable[..., Shape]) -> Iterator[Cluster]:
    """Six routers and six workers, each of which begins again within a moment."""
    with running(tmp_path_factory.mktemp("spares"), shape_of(6, "--grace-ms", "60000")) as cluster:
        yield cluster
        cluster.revive()


class Reader:
    """Reads one response through all routers in turn, and goes on after the last number where its stream breaks."""

    def __init__(self, cluster: Cluster) -> None:
        bases = [f"http://{endpoint}/v1" for endpoint in cluster.http_endpoints]
        clients = [openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=10) for base in bases]
        self._turns = itertools.cycle(enumerate(clients))
        self.router = 0  # the number of the one that was called last
        self.events: list[dict[str, Any]] = []
        self.num_breaks = 0
        self.begun = threading.Event()

    def read(self, max_tokens: int) -> list[dict[str, Any]]:
        stream, until = self._next().responses.create(**ASKED, max_output_tokens=max_tokens), time.monotonic()
        while not self._read_to_end(stream):
            self.num_breaks += 1
            stream = None
            while stream is None:
                assert time.monotonic() < until + END_S, f"{len(self.events)} events and no end"
                stream = self._go_on()
        return self.events

    def _next(self) -> Any:
        self.router, client = next(self._turns)
        return client

    def _go_on(self) -> Any:
        name, last = self.events[0]["response"]["id"], self.events[-1]["sequence_number"]
        try:
            return self._next().responses.retrieve(name, stream=True, starting_after=last)
        except openai.OpenAIError:  # that router is dead, or has met no worker yet
            time.sleep(0.1)
            return None

    def _read_to_end(self, stream: Any) -> bool:
        with suppress(openai.OpenAIError, httpx2.TransportError):  # the router is dead
            for event in stream:
                self.events.append(event.to_dict())
                self.begun.set()
        return bool(self.events) and self.events[-1]["type"] in LAST


async def owner_of(cluster: Cluster, name: str) -> str:
    """The name of the worker that owns the response, by the store; empty if none does."""
    store = open_store(cluster.store.url)
    await store.open()
    try:
        found = await store.read(sequence_id(TENANT, RequestId(name)))
        workers = {member.id: json.loads(member.info)["worker_id"] for member in await store.members("worker")}
    finally:
        await store.close()
    return "" if found is None else workers.get(found.record.owner, "")


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_kills_of_those_that_have_the_response_leave_one_sequence(spares: Cluster) -> None:
    """At a fixed pace: nobody waits until what was killed is back, the router that is read and the owner."""
    usual = {"PACE_S": 2, "SECONDS": 90}
    pace_s, seconds = (float(os.environ.get(f"OCTAVO_TEST_{name}", value)) for name, value in usual.items())
    undisturbed, reader, reading = await begun(spares, MANY)
    killed, due = Counter[str](), time.monotonic()
    ends = due + seconds
    while not reading.done() and time.monotonic() < ends:
        due += pace_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        for victim in filter(None, (f"r{reader.router}", await owner_of(spares, reader.events[0]["response"]["id"]))):
            process = spares.processes[victim]
            if process.running:
                await asyncio.to_thread(process.kill)
                killed[victim[0]] += 1
            process.start()
    await check_end(undisturbed, reader, reading, killed)


async def begun(cluster: Cluster, max_tokens: int) -> tuple[list[dict[str, Any]], Reader, "asyncio.Task[Any]"]:
    """The events of an undisturbed response, and one that is under way."""
    undisturbed, reader = await asyncio.to_thread(Reader(cluster).read, max_tokens), Reader(cluster)
    reading = asyncio.create_task(asyncio.to_thread(reader.read, max_tokens))
    assert await asyncio.to_thread(reader.begun.wait, END_S)
    return undisturbed, reader, reading


async def check_end(undisturbed: Any, reader: Reader, reading: "asyncio.Task[Any]", killed: object) -> Any:
    events = await reading
    print(f"{killed} killed, {reader.num_breaks} breaks, {len(events)} events")
    assert [event["sequence_number"] for event in events] == list(range(len(undisturbed)))
    assert without_names(events) == without_names(undisturbed)
    assert reader.num_breaks
    return events


@pytest.mark.scaled
@pytest.mark.timeout(900)
async def test_events_have_no_gap_and_are_those_of_an_undisturbed_run(cluster):
    undisturbed, reader, reading = await begun(cluster, draws(250, 3000))
    num_kills = 0
    while not reading.done():
        await asyncio.sleep(EVERY_S)
        victims = [f"{kind}{num_kills % 2}" for kind in "rw"]
        for act in (cluster.kill, cluster.spawn):
            for victim in victims:
                await asyncio.to_thread(act, victim)
        await asyncio.to_thread(cluster.wait_ready)  # a busy machine takes longer to start them than to kill them
        num_kills += 1
    events = await check_end(undisturbed, reader, reading, num_kills)
    cluster.revive()
    name = events[0]["response"]["id"]
    for endpoint in cluster.http_endpoints:
        with openai.OpenAI(base_url=f"http://{endpoint}/v1", api_key="none") as client:
            assert client.responses.retrieve(name).to_dict() == events[-1]["response"]
            assert [event.to_dict() for event in client.responses.retrieve(name, stream=True)] == events
