"""Vectors from processes: what docs/embeddings.md shows runs, and a worker that is killed costs no vector."""

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest
from effort import some
from live.cluster import Cluster, Shape
from live.fixtures import whole

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/embeddings.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SERVED = [block for block in BLOCKS if "LLM(" not in block[1]]
TEXTS = [f"{i} {'words ' * (i % 50)}" for i in range(200)]


@pytest.mark.parametrize(("language", "block"), SERVED, ids=[f"{i}" for i in range(len(SERVED))])
def test_the_page_shows_what_runs(cluster: Cluster, language: str, block: str) -> None:
    """Addresses and the model's name are the only things that differ."""
    names = {
        "127.0.0.1:58051": cluster.http_endpoints[0],
        "127.0.0.1:50051": cluster.endpoints[0],
        "smollm2": "witness",
        "dimensions=64": "dimensions=16",
    }
    for shown, here in names.items():
        block = block.replace(shown, here)
    if language == "sh":
        for words in commands(block):
            post(words)
        return
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell."""
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def post(words: list[str]) -> None:
    """Does what a command of curl does, which need not be installed."""
    assert words[:2] == ["curl", "-s"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options.keys() == {"-H", "-d"}
    name, value = options["-H"].split(": ")
    answer = httpx2.post(words[2], headers={name: value}, content=options["-d"], timeout=60)
    assert answer.status_code == 200, answer.text


# Small steps, so that a call of 200 inputs takes a second.
SMALL = Shape(step_delay_ms=20, worker_args=("--max-batch-tokens", "256", "--max-batch-sequences", "16"))


@pytest.fixture
def small(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    yield from whole(clusters(SMALL))


FAULTS = some(list(product(["kill", "pause", "terminate"], ["", "mean"])), [("kill", "")])


@pytest.mark.parametrize(("fault", "pooling"), FAULTS)
async def test_a_worker_that_dies_hangs_or_leaves_costs_no_vector(small: Cluster, fault: str, pooling: str) -> None:
    async with small.client() as client:
        undisturbed = (await client.embed(TEXTS, pooling=pooling)).vectors
        call = asyncio.create_task(client.embed(TEXTS, pooling=pooling))
        await busy(small, "w0")
        await asyncio.to_thread(getattr(small, fault), "w0")
        assert (await call).vectors == undisturbed


async def test_a_router_that_is_killed_is_called_again_elsewhere(small: Cluster) -> None:
    async with small.client() as client:
        undisturbed = (await client.embed(TEXTS)).vectors
        calls = [asyncio.create_task(client.embed(TEXTS)) for _ in range(2)]
        await busy(small, "w0")
        small.kill("r0")
        assert [(await call).vectors for call in calls] == [undisturbed] * 2


async def busy(cluster: Cluster, name: str) -> None:
    """Returns when the worker computes prompts."""
    async with asyncio.timeout(20):
        while True:
            load: Any = await asyncio.to_thread(cluster.load, name)
            if load.num_running or load.num_waiting:
                return
            await asyncio.sleep(0.02)
