"""A real model's stream that moves again and again is the stream that it would have been: each token, and each score.

Floats decide here, so one key or value that differs in its last bit is found sooner or later.
"""

import asyncio
from dataclasses import replace

import pytest
from live.cluster import Shape
from live.fixtures import running
from live.reader import Reader

from octavo.client import SamplingParams
from octavo.v1 import admin_pb2
from octavo.wire import statuses

NUM_TOKENS = 600
NUM_MOVES = 6
BETWEEN = 50  # tokens; half of the stream is left for a machine on which moves take long
# Shorter than a block: nothing of a prompt is in a cache when the same request is made once more.
PROMPTS = ([504, 3575, 282, 4649, 314], [12047, 260, 2084, 355, 253, 1838, 338], [198, 1, 33, 5, 7])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
MODEL = ("--model", "smollm2", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--kv-cache-bytes", "256MiB")
SHAPE = Shape(routers=1, workers=2, runner="model", step_delay_ms=0, lease_ms=5000, worker_args=MODEL)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with running(tmp_path_factory.mktemp("moved"), SHAPE) as cluster:
        cluster.wait_ready()
        yield cluster


async def move_on(cluster, request_id):
    request = admin_pb2.MigrateRequest(request_id=request_id)
    with statuses.serving_errors():
        return await asyncio.to_thread(cluster.admin().Migrate, request, timeout=60)


async def keep_moving(cluster, request_id, reader):
    for move in range(1, NUM_MOVES + 1):
        await reader.until(move * BETWEEN, 300)
        assert (await move_on(cluster, request_id)).epoch == 1 + move


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompt", PROMPTS[:1], ids=len)
async def test_a_stream_that_moves_six_times_is_the_same_to_the_last_bit(pair, prompt):
    async with pair.client() as client:
        kinds = {"greedy": GREEDY, "sampled": SAMPLED}
        readers = {
            name: Reader(client.generate(prompt, params, request_id=f"{name}-{len(prompt)}"))
            for name, params in kinds.items()
        }
        await asyncio.gather(*(keep_moving(pair, f"{name}-{len(prompt)}", reader) for name, reader in readers.items()))
        await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers.values())), 400)
        stayed = dict(
            zip(kinds, await asyncio.gather(*(client.complete(prompt, each) for each in kinds.values())), strict=True)
        )
        for name, reader in readers.items():
            (output,) = stayed[name].outputs
            assert len(output.token_ids) == NUM_TOKENS
            assert reader.tokens == {0: list(output.token_ids)}, name
            assert reader.scores == {0: list(output.logprobs)}, name
            assert reader.stream.num_reattaches == 0
