"""OpenAI's own package for Node, unchanged, against a router."""

import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from example import languages
from response_events import without_names

PROGRAM = Path(__file__).parent / "openai_node"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program with its packages."""
    folder = tmp_path_factory.mktemp("openai") / "node"
    shutil.copytree(PROGRAM, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--loglevel", "error"]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def state_of(base: str, request_id: str) -> str:
    with urllib.request.urlopen(f"{base}/requests/{request_id}?wait=false", timeout=30) as reply:
        return str(json.load(reply)["state"])


@pytest.mark.timeout(900)
@pytest.mark.skipif("node" not in languages(), reason="Node is not among the chosen languages")
def test_the_package_for_node(cluster, installed):
    base = f"http://{cluster.http_endpoints[0]}/v1"
    done = subprocess.run(
        ["node", "client.mjs", base], cwd=installed, stdin=subprocess.DEVNULL, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["text"] == found["whole"]
    assert found["usage"]["completion_tokens"] == 24
    assert found["requestId"] == found["wholeId"]
    assert found["errors"] == [
        ["BadRequestError", 400, "invalid_argument", "temperature"],
        ["NotFoundError", 404, "model_not_found", "model"],
    ]
    assert found["models"] == ["fake"]
    deadline = time.monotonic() + 30
    while (state := state_of(base, found["leftId"])) != "cancelled" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert state == "cancelled"


@pytest.mark.timeout(900)
@pytest.mark.skipif("node" not in languages(), reason="Node is not among the chosen languages")
def test_a_response_goes_on_through_another_router(chat_cluster, installed):
    bases = [f"http://{endpoint}/v1" for endpoint in chat_cluster.http_endpoints]
    command = ["node", "responses.mjs", *bases]
    done = subprocess.run(command, cwd=installed, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["numbers"] == list(range(len(found["numbers"])))
    assert found["text"] == found["again"] == found["whole"]
    assert (found["last"], found["status"], found["input"], found["next"]) == (
        "response.incomplete", "incomplete", ["And?"], True
    )  # fmt: skip
    assert found["gone"] == ["NotFoundError", 404, "not_found"]


def unbroken(cluster, installed, tokens, pace_s=0.0):
    """All events of a response, and how often its stream broke. Kills come at that pace, if any."""
    bases = [f"http://{endpoint}/v1" for endpoint in cluster.http_endpoints]
    command, turns, num_kills = ["node", "unbroken.mjs", str(tokens), *bases], itertools.cycle(range(2)), 0
    out = installed / f"events-{pace_s}"
    with (
        out.open("wb") as file,
        subprocess.Popen(command, cwd=installed, stdin=subprocess.DEVNULL, stdout=file) as node,
    ):
        while node.poll() is None:
            time.sleep(pace_s or 0.2)
            if pace_s and out.stat().st_size:
                number = next(turns)
                for victim in (f"r{number}", f"w{number}"):
                    if cluster.processes[victim].running:
                        cluster.kill(victim)
                        num_kills += 1
                    cluster.spawn(victim)
                cluster.wait_ready()
    assert node.returncode == 0
    *events, last = [json.loads(line) for line in out.read_text().splitlines()]
    print(f"{num_kills} kills, {last['breaks']} breaks, {len(events)} events")
    return events, last["breaks"]


@pytest.mark.timeout(1800)
@pytest.mark.skipif("node" not in languages(), reason="Node is not among the chosen languages")
def test_a_response_has_one_sequence_while_routers_and_workers_are_killed(chat_cluster, installed):
    tokens = int(os.environ.get("OCTAVO_TEST_TOKENS", "3000"))
    undisturbed, _ = unbroken(chat_cluster, installed, tokens)
    events, num_breaks = unbroken(chat_cluster, installed, tokens, pace_s=2.0)
    assert [event["sequence_number"] for event in events] == list(range(len(undisturbed)))
    assert without_names(events) == without_names(undisturbed)
    assert num_breaks
