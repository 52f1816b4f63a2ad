"""OpenAI's own package for Node, unchanged, against a router."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from example import languages
from live.process import wait_until

PROGRAM = Path(__file__).parent / "openai_node"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("node" not in languages(), reason="Node is not among the chosen languages"),
]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with its packages."""
    folder = tmp_path_factory.mktemp("openai") / "node"
    shutil.copytree(PROGRAM, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def said(installed: Path, program: str, *bases: str) -> Any:
    command = ["node", program, *bases]
    done = subprocess.run(command, cwd=installed, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_the_package_for_node(cluster, installed):
    base = f"http://{cluster.http_endpoints[0]}/v1"
    found = said(installed, "client.mjs", base)
    assert found["text"] == found["whole"]
    assert found["usage"]["completion_tokens"] == 24
    assert found["requestId"] == found["wholeId"]
    assert found["errors"] == [
        ["BadRequestError", 400, "invalid_argument", "temperature"],
        ["NotFoundError", 404, "model_not_found", "model"],
    ]
    assert found["models"] == ["fake"]

    def is_cancelled():
        with urllib.request.urlopen(f"{base}/requests/{found['leftId']}?wait=false", timeout=30) as reply:
            return json.load(reply)["state"] == "cancelled"

    wait_until(is_cancelled, 30, "what was left runs on")


def test_a_response_goes_on_through_another_router(chat_cluster, installed):
    bases = [f"http://{endpoint}/v1" for endpoint in chat_cluster.http_endpoints]
    found = said(installed, "responses.mjs", *bases)
    assert found["numbers"] == list(range(len(found["numbers"])))
    assert found["text"] == found["again"] == found["whole"]
    assert (found["last"], found["status"], found["input"], found["next"]) == (
        "response.incomplete", "incomplete", ["And?"], True
    )  # fmt: skip
    assert found["gone"] == ["NotFoundError", 404, "not_found"]
