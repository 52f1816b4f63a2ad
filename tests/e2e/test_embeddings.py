"""Vectors from processes: what docs/embeddings.md shows runs, and a worker that is killed costs no vector."""

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from effort import some
from live.cluster import Cluster, Shape
from live.fixtures import whole
from waiting import until

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
    if language == "python":
        done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        return
    for line in block.replace("\\\n", " ").splitlines():  # does what curl does, which need not be installed
        words = shlex.split(line)
        assert words[:2] == ["curl", "-s"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert options.keys() == {"-H", "-d"}
        answer = httpx2.post(words[2], headers=[options["-H"].split(": ")], content=options["-d"], timeout=60)
        assert answer.status_code == 200, answer.text


# Small steps, so that a call of 200 inputs takes a second.
SMALL = Shape(step_delay_ms=20, worker_args=("--max-batch-tokens", "256", "--max-batch-sequences", "16"))


@pytest.fixture
def small(clusters: Callable[[Shape], Cluster]) -> Iterator[Cluster]:
    yield from whole(clusters(SMALL))


FAULTS = [(fault, pooling, "w0") for fault in ("kill", "pause", "terminate") for pooling in ("", "mean")]
USUAL = [("kill", "", "w0"), ("kill", "", "r0")]


@pytest.mark.parametrize(("fault", "pooling", "victim"), some([*FAULTS, USUAL[1]], USUAL))
async def test_a_process_that_dies_hangs_or_leaves_costs_no_vector(
    small: Cluster, fault: str, pooling: str, victim: str
) -> None:
    async with small.client() as client:
        undisturbed = (await client.embed(TEXTS, pooling=pooling)).vectors
        calls = [asyncio.create_task(client.embed(TEXTS, pooling=pooling)) for _ in range(2)]
        await until(lambda: asyncio.to_thread(is_busy, small), 20)
        await asyncio.to_thread(getattr(small, fault), victim)
        assert [(await call).vectors for call in calls] == [undisturbed] * 2


def is_busy(cluster: Cluster) -> bool:
    """Whether w0 computes prompts."""
    load = cluster.load("w0")
    return bool(load.num_running or load.num_waiting)
