"""Every process is restarted on purpose, one after the other, under load: no stream fails, no crash is counted, and
most sequences go to other workers with their blocks."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from effort import draws, is_night
from live.client_loops import ClientLoops, read_history
from live.cluster import Cluster, Shape
from live.fixtures import whole

from octavo.client import Event, SamplingParams
from octavo.request.ids import RequestId, sequence_id
from octavo.store import open_store

pytestmark = pytest.mark.long

TENANT = ""  # all clients are one tenant
STREAM_S = 120.0
ROLLED = Shape(workers=4, step_delay_ms=100, router_args=("--drain-ms", "2000"), worker_args=("--drain-ms", "20000"))


@pytest.fixture
def rolled(clusters) -> Iterator[Cluster]:
    """Two routers, four workers with the witness runner; a stream takes about ten seconds."""
    yield from whole(clusters(ROLLED))


@dataclass
class Tally:
    """What the clients saw, and what the records say afterwards."""

    num_streams: int = 0
    num_reattaches: int = 0
    silences: list[float] = field(default_factory=list)  # the longest one of each stream
    worst: tuple[float, str] = (0.0, "")  # the longest of all, and what happened to its stream
    crash_takes: list[str] = field(default_factory=list)
    crashes: int = 0
    num_moved: int = 0  # how often a sequence went to another worker with its blocks
    num_replayed: int = 0  # how often one was given up, and computed again elsewhere

    def __str__(self) -> str:
        ordered = sorted(self.silences)
        p99 = ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
        return (
            f"{self.num_streams} streams, {self.num_reattaches} re-attached, longest silence of a stream: median "
            f"{ordered[len(ordered) // 2]:.2f} s, p99 {p99:.2f} s, most {ordered[-1]:.2f} s; crashes {self.crashes}, "
            f"takes from lost owners {len(self.crash_takes)}; {self.num_moved} moved with their blocks, "
            f"{self.num_replayed} replayed; the longest {self.worst[1]}"
        )

    def p99(self) -> float:
        return sorted(self.silences)[int(0.99 * (len(self.silences) - 1))]


class Silence:
    """The longest time without an event of one stream."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.since_s = 0.0  # when it began, from the stream's beginning on
        self._began = time.monotonic()
        self._last: float | None = None

    def note_event(self, _: Event) -> None:
        now = time.monotonic()
        if self._last is not None and now - self._last > self.longest_s:
            self.longest_s, self.since_s = now - self._last, self._last - self._began
        self._last = now


class SlowStreams(ClientLoops):
    """Clients with one stream after the other until `stop`. A wrong token or an error of a stream is an error here."""

    def __init__(self, cluster: Cluster, oracle, num_clients: int, seed: int) -> None:
        super().__init__(cluster.client())
        self.tally = Tally()
        self._oracle = oracle
        self._random = random.Random(seed)
        self._store = open_store(cluster.store.url)
        self._num_begun = 0
        self.begin(num_clients)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._store.close()

    async def stream_once(self, number: int) -> None:
        self._num_begun += 1
        request_id = f"slow-{os.getpid()}-{id(self)}-{self._num_begun}"
        prompt = [self._random.randrange(1, 1000) for _ in range(self._random.choice([8, 40, 200]))]
        params = SamplingParams(temperature=0.0, max_tokens=self._random.randrange(60, 120), ignore_eos=True)
        silence, stream = Silence(), self.client.generate(prompt, params, request_id=request_id)
        history = await read_history(stream, STREAM_S, silence.note_event)
        history.check(self._oracle.outputs(prompt, params))
        tally = self.tally
        tally.num_streams += 1
        tally.num_reattaches += stream.num_reattaches
        tally.silences.append(silence.longest_s)
        snapshot = await self._store.read(sequence_id(TENANT, RequestId(request_id)))
        assert snapshot is not None
        lines = " ".join(f"{line.after_ms}:{line.what}:{line.detail}" for line in snapshot.record.timeline)
        tally.worst = max(tally.worst, (silence.longest_s, f"from {silence.since_s:.2f} s on: {lines}"))
        tally.crashes = max(tally.crashes, snapshot.record.crashes)
        tally.num_moved += sum(line.what == "migrated" for line in snapshot.record.timeline)
        tally.num_replayed += sum(line.what == "requeued" for line in snapshot.record.timeline)
        for line in snapshot.record.timeline:
            if line.what == "taken" and line.detail.split(" ")[1] in ("lease", "connection"):
                tally.crash_takes.append(f"{request_id} {line.detail}")


async def roll(cluster: Cluster, name: str) -> float:
    """Restarts one process; returns once the whole cluster is ready. How long the process took to end."""
    took = await asyncio.to_thread(cluster.terminate, name)
    await asyncio.to_thread(cluster.spawn, name)
    await asyncio.to_thread(cluster.wait_ready)
    return took


@pytest.mark.scaled
@pytest.mark.night
@pytest.mark.timeout(3600)
async def test_rolling_workers_and_routers_is_a_short_pause_for_clients(rolled, oracle, seed):
    """For ten minutes with 64 streams with `--night`; each process once with 16 in `make test`."""
    rng = random.Random(seed)
    streams = SlowStreams(rolled, oracle, draws(16, 64), seed)
    await asyncio.sleep(3)
    minutes = float(os.environ.get("OCTAVO_TEST_ROLL_MINUTES", draws(0, 10)))
    until, names, num_rolled = time.monotonic() + 60 * minutes, list(rolled.processes), 0
    while num_rolled == 0 or time.monotonic() < until:
        rng.shuffle(names)
        for name in names:
            streams.check()
            took = await roll(rolled, name)
            num_rolled += 1
            print(f"{num_rolled}: {name} ended after {took:.1f} s; {streams.tally.num_streams} streams so far")
            if time.monotonic() > until and num_rolled >= len(names):
                break
    await streams.stop()
    tally = streams.tally
    print(f"{num_rolled} restarts: {tally}")
    assert tally.crashes == 0
    assert tally.crash_takes == []
    assert tally.num_reattaches > 0
    assert tally.num_moved > tally.num_replayed
    assert tally.p99() <= (1.5 if is_night() else 10.0)  # of few streams, the longest: no figure for a busy machine
