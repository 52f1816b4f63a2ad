"""kill -9 of workers of which one guesses tokens and one does not: each stream is that of a run without guesses."""

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
from live.cluster import Cluster, Shape
from live.fixtures import running
from live.history import History
from live.traffic import read_history
from waiting import until

from octavo.client import SamplingParams

GUESSING, PLAIN = "w0", "w1"
NUM_KILLS = 4
STREAM_S = 300.0
TEXT = (
    "Repeat word for word: The keeper climbed a hundred and twelve steps, lit the lamp, and wrote the hour into a book."
)
REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, repetition_penalty=1.1, logprobs=1),
    SamplingParams(temperature=0.7, seed=11, max_tokens=150, ignore_eos=True, n=2),
    SamplingParams(temperature=1.2, seed=12, top_p=0.9, max_tokens=150, ignore_eos=True, presence_penalty=0.3),
    SamplingParams(temperature=0.3, seed=13, max_tokens=150, min_tokens=100, stop=("hour",), logprobs=0),
]


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    common = ("--model", "smollm2", "--kv-cache-bytes", "200000000", "--swap-bytes", "0", "--device", "cpu")
    kinds = (("--speculation", "recent"), ("--speculation", "off"))
    shape = Shape(runner="model", start_s=300, lease_ms=8000, worker_args=common, each_worker=kinds)
    with running(tmp_path_factory.mktemp("cluster"), shape) as cluster:
        yield cluster
        cluster.revive()


async def streams(cluster: Cluster) -> list[History]:
    """One stream of each of the requests, all at a time."""
    async with cluster.client() as client:
        asked = [client.generate(f"{TEXT} ({number}) {TEXT}", params) for number, params in enumerate(REQUESTS)]
        return await asyncio.gather(*(read_history(stream, STREAM_S) for stream in asked))


def is_busy(cluster: Cluster, worker: str, told: "asyncio.Task[list[History]]") -> bool:
    """Whether it runs some of the streams; also once all have ended."""
    return told.done() or cluster.load(worker).num_running > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_streams_are_the_same_through_kills_of_workers_with_and_without_guesses(cluster: Cluster) -> None:
    await asyncio.to_thread(cluster.kill, GUESSING)
    expected = await streams(cluster)
    assert all(history.ended for history in expected)
    num_right, num_moved = 0, 0
    for number in range(NUM_KILLS):
        victim = (PLAIN, GUESSING)[number % 2]
        await asyncio.to_thread(cluster.revive)
        told = asyncio.create_task(streams(cluster))
        await until(partial(asyncio.to_thread, is_busy, cluster, victim, told), STREAM_S)
        await asyncio.sleep(0.3 + 0.2 * number)
        if not told.done():
            load = cluster.load(victim)
            num_moved += load.num_running > 0
            num_right += sum(each.num_accepted_drafts for each in load.drafts)
            cluster.kill(victim)
        said = [[(each.tokens, each.texts, each.finishes) for each in told_by] for told_by in (await told, expected)]
        assert said[0] == said[1]
        if victim == PLAIN:
            num_right += sum(each.num_accepted_drafts for each in cluster.load(GUESSING).drafts)
    print(f"{num_moved} kills hit running streams; {num_right} guessed tokens were right")
    assert num_moved > 1
    assert num_right > 20
