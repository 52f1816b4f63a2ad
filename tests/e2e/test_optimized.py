"""`python -O` removes each assert: programs that run so refuse, recover and deliver as others do."""

import asyncio
import subprocess
import sys

import pytest
from live.cluster import ROOT, Shape
from live.fixtures import running
from live.history import History

from octavo.client import SamplingParams
from octavo.request.errors import InvalidArgument

PARAMS = SamplingParams(temperature=0, max_tokens=300)
PROMPTS = [[number, 5, 6, 7] for number in range(6)]


@pytest.fixture
def optimized(tmp_path, monkeypatch):
    """Processes that are started now run without asserts. All they import is compiled for that, once."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "compiled"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    subprocess.run([sys.executable, "-c", "assert False"], check=True)
    imports = "import torch, router.program, gpu_worker.serving.process.program"
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_cluster_without_asserts_loses_no_token(tmp_path, optimized, oracle):
    with running(tmp_path / "cluster", Shape(routers=2, workers=2)) as cluster:
        async with cluster.client() as client:
            begun = asyncio.Event()

            async def one(prompt):
                history = History()
                async for event in client.generate(prompt, PARAMS):
                    history.add(event)
                    begun.set()
                history.check(oracle.outputs(prompt, PARAMS))

            streams = asyncio.gather(*map(one, PROMPTS))
            await begun.wait()
            for name in ("w0", "r0"):
                cluster.kill(name)
            await streams
            cluster.revive()
            with pytest.raises(InvalidArgument):
                await client.complete([1], max_tokens=-1)
            with pytest.raises(InvalidArgument):
                await client.complete([10**6], max_tokens=1)
