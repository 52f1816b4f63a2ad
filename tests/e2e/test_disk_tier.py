"""Files of blocks outlive all workers, and a prompt finds the worker that can read its prefix."""

import random
from pathlib import Path

import pytest
from live.cluster import Cluster, Shape
from live.fixtures import running
from live.oracle import Oracle
from waiting import until

NUM_WORKERS, NUM_PROMPTS, NUM_TOKENS = 3, 8, 320
# Nothing is in memory after a start, and nothing comes from another worker.
WORKER_ARGS = ("--warm-up-ms", "0", "--no-prefix-fetch", "--block-size", "16")


async def where(cluster: Cluster, oracle: Oracle, prompt: list[int]) -> tuple[str, int]:
    """Which worker runs the prompt, and how many of its tokens were there."""
    async with cluster.client() as client:
        answer = await client.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True)
        assert list(answer.outputs[0].token_ids) == list(oracle.tokens(prompt, 4))
        status = await client.get(answer.request_id)
    (worker,) = (entry.worker for entry in status.timeline if entry.what == "taken")
    return worker, answer.usage.cached_tokens


@pytest.mark.timeout(240)
async def test_after_the_death_of_all_workers_prompts_go_where_their_files_are(
    tmp_path: Path, oracle: Oracle, rng: random.Random
) -> None:
    """Each worker has a directory of its own, as on hosts of their own."""
    directories = [tmp_path / f"blocks{number}" for number in range(NUM_WORKERS)]
    each = tuple(("--disk-tier", str(directory)) for directory in directories)
    shape = Shape(routers=1, workers=NUM_WORKERS, step_delay_ms=2, worker_args=WORKER_ARGS, each_worker=each)
    prompts = [rng.choices(range(1, 900), k=NUM_TOKENS) for _ in range(NUM_PROMPTS)]
    with running(tmp_path / "cluster", shape) as cluster:
        owners = [(await where(cluster, oracle, prompt))[0] for prompt in prompts]
        assert len(set(owners)) == NUM_WORKERS

        def all_written() -> bool:
            num_files = sum(len(list(directory.glob("*/*"))) for directory in directories)
            return num_files >= NUM_PROMPTS * (NUM_TOKENS // 16)

        await until(all_written, 60)
        for name in cluster.worker_endpoints:
            cluster.kill(name)
        cluster.revive()
        found = list(zip(prompts, owners, strict=True))
        rng.shuffle(found)  # else the same worker would have its turn
        for prompt, owner in found:
            worker, num_cached = await where(cluster, oracle, prompt)
            assert worker == owner
            assert num_cached == (NUM_TOKENS - 1) // 16 * 16
