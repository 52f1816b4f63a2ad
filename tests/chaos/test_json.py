"""Streams whose form is JSON, on real processes that are killed and whose sequences move: not one byte is another."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest
from constraints import JSON_FORMS, check_json
from live.cluster import Cluster, Shape
from live.fixtures import running
from live.history import History
from live.traffic import Traffic

from octavo.client import FinishReason, SamplingParams
from octavo.request.errors import ServingError
from octavo.v1 import admin_pb2, admin_pb2_grpc

NUM_STREAMS, KILL_EVERY_S, MOVE_EVERY_S, MOVE_S = 8, 2.0, 0.1, 10.0


class JsonTraffic(Traffic):
    """Two branches of JSON a stream; `counts` what came, and the changes of owner in the midst of it."""

    counts: Counter[str]

    async def ended(self, name: str, params: SamplingParams, history: History) -> None:
        self.counts["streams"] += 1
        for branch, finish in history.finishes.items():
            if finish is FinishReason.STOP:
                check_json(params.constraint, history.texts[branch])
                self.counts["whole outputs"] += 1
        self.counts["bytes"] += sum(len(text.encode()) for text in history.texts.values())
        first_ms = 1000 * (history.times[1] - history.times[0])
        with suppress(ServingError):  # the timeline begins later than the call, never earlier
            for entry in (await self.client.get(name)).timeline:
                if entry.after_ms > first_ms and entry.what in ("taken", "migrated"):
                    reason = entry.detail.split(" ")[1] if entry.what == "taken" else "with its blocks"
                    self.counts[f"inside JSON: {entry.what} {reason}"] += 1


@pytest.fixture
def spares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = Shape(routers=3, workers=4, step_delay_ms=30)
    with running(tmp_path_factory.mktemp("spares"), shape) as cluster:
        yield cluster
        cluster.revive()


async def move_on(cluster: Cluster, traffic: JsonTraffic, rng: random.Random) -> None:
    """Moves one running request after the other, by any router that answers."""
    while True:
        await asyncio.sleep(MOVE_EVERY_S)
        if not traffic.running:
            continue
        asked = admin_pb2.MigrateRequest(request_id=rng.choice(sorted(traffic.running)))
        async with grpc.aio.insecure_channel(rng.choice(cluster.admin_endpoints)) as channel:
            with suppress(grpc.aio.AioRpcError):
                await admin_pb2_grpc.AdminStub(channel).Migrate(asked, timeout=MOVE_S)
                traffic.counts["moves"] += 1


@pytest.mark.long
@pytest.mark.timeout(7200)
async def test_json_is_the_same_through_kills_and_moves(spares: Cluster, oracle, seed: int) -> None:
    rng = random.Random(seed)

    def draw(number):
        prompt, form = [rng.randrange(1, 1000) for _ in range(24)], rng.choice(JSON_FORMS)
        params = SamplingParams(temperature=1.0, seed=rng.randrange(2**63), n=2, constraint=form, max_tokens=160)
        return prompt, params, oracle.outputs(prompt, params)

    traffic = JsonTraffic(spares.client(), draw, 120)
    counts = traffic.counts = Counter()
    traffic.begin(NUM_STREAMS)
    moving = asyncio.create_task(move_on(spares, traffic, rng))
    ends = time.monotonic() + float(os.environ.get("OCTAVO_TEST_SECONDS", "60"))
    while time.monotonic() < ends:
        await asyncio.sleep(KILL_EVERY_S)
        traffic.check()
        victim = rng.choice(sorted(spares.processes))
        if spares.processes[victim].running:
            await asyncio.to_thread(spares.kill, victim)
            counts[f"kills of {'routers' if victim.startswith('r') else 'workers'}"] += 1
        spares.spawn(victim)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    await traffic.stop()
    print(dict(counts))
    assert counts["whole outputs"] and counts["kills of workers"]
