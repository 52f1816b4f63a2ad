"""Every process is restarted on purpose, one after the other, under load: no stream fails, no crash is counted, and
most sequences go to other workers with their blocks."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from effort import draws, is_night
from live.cluster import Cluster, Shape
from live.fixtures import whole
from live.history import History
from live.traffic import Traffic

from octavo.client import SamplingParams
from octavo.request.ids import RequestId, sequence_id
from octavo.store import open_store

pytestmark = pytest.mark.long

ROLLED = Shape(workers=4, step_delay_ms=100, router_args=("--drain-ms", "2000"), worker_args=("--drain-ms", "20000"))


@pytest.fixture
def rolled(clusters) -> Iterator[Cluster]:
    """Two routers, four workers with the witness runner; a stream takes about ten seconds."""
    yield from whole(clusters(ROLLED))


class SlowTraffic(Traffic):
    """Long greedy streams, and what their records say afterwards."""

    def __init__(self, cluster: Cluster, oracle, seed: int) -> None:
        rng = random.Random(seed)

        def draw(number):
            prompt = [rng.randrange(1, 1000) for _ in range(rng.choice([8, 40, 200]))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(60, 120), ignore_eos=True)
            return prompt, params, oracle.outputs(prompt, params)

        super().__init__(cluster.client(), draw, 120)
        self.silences: list[tuple[float, str]] = []  # the longest one of each stream, and what happened to it
        self.what = Counter[str]()  # in the timelines of all
        self.crash_takes: list[str] = []
        self.crashes = 0
        self._store = open_store(cluster.store.url)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._store.close()

    async def ended(self, name: str, params: SamplingParams, history: History) -> None:
        snapshot = await self._store.read(sequence_id("", RequestId(name)))  # all clients are one tenant
        assert snapshot is not None
        timeline = snapshot.record.timeline
        silence = max(after - before for before, after in pairwise(history.times[1:]))
        self.silences.append((silence, " ".join(f"{line.after_ms}:{line.what}:{line.detail}" for line in timeline)))
        self.crashes = max(self.crashes, snapshot.record.crashes)
        self.what.update(line.what for line in timeline)
        takes = [line.detail for line in timeline if line.what == "taken"]
        self.crash_takes += [f"{name} {take}" for take in takes if take.split(" ")[1] in ("lease", "connection")]


@pytest.mark.scaled
@pytest.mark.night
@pytest.mark.timeout(3600)
async def test_rolling_workers_and_routers_is_a_short_pause_for_clients(rolled, oracle, seed):
    """For ten minutes with 64 streams with `--night`; each process once with 16 in `make test`."""
    rng, streams = random.Random(seed), SlowTraffic(rolled, oracle, seed)
    streams.begin(draws(16, 64))
    await asyncio.sleep(3)
    minutes = float(os.environ.get("OCTAVO_TEST_ROLL_MINUTES", draws(0, 10)))
    until, names, num_rolled = time.monotonic() + 60 * minutes, list(rolled.processes), 0
    while num_rolled == 0 or time.monotonic() < until:
        rng.shuffle(names)
        for name in names:
            streams.check()
            took = await asyncio.to_thread(rolled.terminate, name)
            await asyncio.to_thread(rolled.spawn, name)
            await asyncio.to_thread(rolled.wait_ready)
            num_rolled += 1
            print(f"{num_rolled}: {name} ended after {took:.1f} s; {streams.num_streams} streams so far")
            if time.monotonic() > until and num_rolled >= len(names):
                break
    await streams.stop()
    ordered = sorted(streams.silences)
    median, (p99, _) = ordered[len(ordered) // 2][0], ordered[int(0.99 * (len(ordered) - 1))]
    print(f"{num_rolled} restarts: {streams.num_streams} streams, {streams.num_reattaches} re-attached")
    print(f"longest silence of a stream: median {median:.2f} s, p99 {p99:.2f} s, most {ordered[-1]}; {streams.what}")
    assert (streams.crashes, streams.crash_takes) == (0, [])
    assert streams.num_reattaches > 0
    assert streams.what["migrated"] > streams.what["requeued"]  # most go with their blocks, and few are replayed
    assert p99 <= (1.5 if is_night() else 10.0)  # of few streams, the longest: no figure for a busy machine
