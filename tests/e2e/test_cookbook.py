"""The README's blocks marked <!-- cookbook --> do what they say, as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCK = re.compile(r"^<!-- cookbook -->\n+```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README.read_text())


def worker_of(cluster):
    return cluster.worker_endpoints["w0"]


def test_there_are_blocks():
    assert BLOCKS
    assert README.read_text().count("<!-- cookbook -->") == len(BLOCKS), "a mark without an sh block behind it"


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(cluster, block):
    """Addresses are the only thing that differs from what a reader has: those of `octavo up` become the cluster's."""
    bin_directory = Path(sys.executable).parent
    if not shutil.which("grpcurl", path=f"{bin_directory}:{os.environ['PATH']}"):
        pytest.skip("grpcurl is not installed")
    addresses = {"50051": cluster.endpoints[0], "51051": cluster.admin_endpoints[0], "50061": worker_of(cluster)}
    script = block.replace(".venv/bin/", "")
    for port, address in addresses.items():
        script = script.replace(f"127.0.0.1:{port}", address)
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        cwd=README.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert "DeadlineExceeded" not in done.stderr
