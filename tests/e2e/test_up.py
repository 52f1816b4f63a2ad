"""`octavo up` itself: what it starts it keeps alive, and takes down with it, however it ends."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
from guard.processes import descendants, exists
from live.cluster import ROOT
from live.oracle import Oracle
from live.process import Process, wait_until

from octavo.cli import main
from octavo.client import Client, FinishReason, RetryPolicy, SamplingParams

STOP_S = 40.0
STORY_PATIENCE_S = 120.0


class Up:
    """A running `octavo up`, and the other commands beside it."""

    def __init__(self, directory, *more, routers=2, workers=2, state_dir=None):
        self.state_dir = state_dir or directory / "state"
        options = ["--routers", routers, "--workers", workers, "--grpc-port", 0, "--state-dir", self.state_dir]
        options += ["--runner", "fake", "--step-delay-ms", 10, "--lease-ms", 2000, "--json", *more]
        command = [sys.executable, "-m", "octavo.cli", "up", *map(str, options)]
        log = directory / f"up-{len(list(directory.iterdir()))}.log"
        self.process = Process("up", command, log, ROOT)
        self.process.start()
        wait_until(self._ready, 90, f"octavo up is not ready:\n{self.process.tail()}")

    def _ready(self):
        assert self.process.running, self.process.tail()
        return '"ready": true' in self.process.log.read_text()

    def run(self, *words):
        """Another command of the CLI; its JSON."""
        done = self.started(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def started(self, *words):
        command = [sys.executable, "-m", "octavo.cli", *map(str, words), "--json", "--state-dir", str(self.state_dir)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)

    def status(self):
        """Asked in this process: a test asks many times, and a command takes longer to start than to answer."""
        with redirect_stdout(io.StringIO()) as told, redirect_stderr(io.StringIO()):
            if main(["status", "--json", "--state-dir", str(self.state_dir)]):
                return None
        return json.loads(told.getvalue())

    def children(self):
        return descendants(self.process.pid)

    def pids(self):
        """By name, of what `status` reports."""
        return pids(self.status())

    def whole(self):
        return is_whole(self.status())


def pids(status):
    """By name, of what `status` reports."""
    found = {router["router_id"]: router["pid"] for router in status["routers"]}
    found |= {worker["worker_id"]: worker["pid"] for worker in status["workers"]}
    return found | {"store": status["store"]["pid"]}


def is_whole(status):
    if status is None:
        return False
    serving = [status["store"], *status["routers"]]
    return all(part["serving"] for part in serving) and all(worker["available"] for worker in status["workers"])


@pytest.fixture
def up(tmp_path, request):
    up = Up(tmp_path)
    yield up
    children = up.children()
    up.process.stop()
    for pid in children:
        wait_until(lambda pid=pid: not exists(pid), STOP_S, f"process {pid} is left")


def has_come_back(up, name, old_pid):
    """Whether all is whole with another process of that name: `octavo up` notices an end a moment later."""
    time.sleep(0.2)  # what is awaited needs the processor more than whoever asks
    status = up.status()
    return is_whole(status) and pids(status)[name] not in (old_pid, None)


def check_status(up):
    status = up.run("status")
    assert [router["router_id"] for router in status["routers"]] == ["router-0", "router-1"]
    assert [worker["worker_id"] for worker in status["workers"]] == ["worker-0", "worker-1"]
    for worker in status["workers"]:
        assert {"incarnation", "endpoint", "num_sequences"} <= worker.keys()
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["used"] + blocks["cached"] == blocks["total"] == 1024
    assert set(up.pids().values()) == set(up.children())


def check_generate(up):
    options = ["--max-tokens", 12, "--temperature", 0.5, "--seed", 5]
    first = up.run("generate", "--prompt", "Once upon", *options)
    assert first.keys() >= {"text", "token_ids", "finish_reason", "usage", "num_reattaches"}
    assert len(first["token_ids"]) == 12
    endpoints = ",".join(router["endpoint"] for router in reversed(up.status()["routers"]))
    again = up.run("generate", "--prompt", "Once upon", *options, "--endpoint", endpoints)
    assert (again["text"], again["token_ids"]) == (first["text"], first["token_ids"])


def check_end(up):
    children = up.children()
    assert up.process.stop(STOP_S) == 0
    assert not [pid for pid in children if exists(pid)]
    assert not (up.state_dir / "state.json").exists()


def check_damaged_store(up):
    """It ends everything, and tells the remedy."""
    children, store = up.children(), up.pids()["store"]
    (written,) = (up.state_dir / "store" / "appendonlydir").glob("*.incr.aof")
    data = bytearray(written.read_bytes())
    data[20:40] = b"?" * 20
    written.write_bytes(data)
    os.kill(store, signal.SIGKILL)
    wait_until(lambda: not up.process.running, STOP_S, "octavo up goes on without a store")
    for pid in children:
        wait_until(lambda pid=pid: not exists(pid), STOP_S, f"process {pid} is left")
    text = up.process.log.read_text()
    assert up.process.stop() == 1
    assert text.count("is damaged") == 1
    assert "valkey-check-aof" in text.splitlines()[-1]
    assert f"rm -r {up.state_dir / 'store'}" in text.splitlines()[-1]


class Story:
    """A stream that is read beside the test: longer than anything the test does in the meantime, on any machine that
    gets through it, and cancelled when it has been through all of it."""

    PROMPT = b"A long story"

    def __init__(self, endpoints):
        self._client = Client(endpoints, policy=RetryPolicy(progress_timeout_s=STORY_PATIENCE_S))
        self.request_id = f"story-{uuid.uuid4()}"
        params = SamplingParams(temperature=0, max_tokens=8000)
        self._stream = self._client.generate(self.PROMPT, params, request_id=self.request_id)
        self.tokens = list(next(self._stream).token_ids)  # it has begun, at the first endpoint
        self._finish_reason = FinishReason.NONE
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        for event in self._stream:
            self.tokens += event.token_ids
            self._finish_reason = event.finish_reason

    def goes_on(self):
        """It brings more, or has ended."""
        told = len(self.tokens)
        wait_until(lambda: len(self.tokens) > told or not self._thread.is_alive(), STORY_PATIENCE_S, "it is stuck")

    def end(self):
        """How often it was attached again."""
        self._client.cancel(self._stream.request_id)
        self._thread.join(STORY_PATIENCE_S)
        assert not self._thread.is_alive(), "a cancelled stream does not end"
        assert self._finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH), "the stream broke"
        self._client.close()
        return self._stream.num_reattaches


@pytest.mark.timeout(600)
def test_what_dies_is_started_again_and_takes_part(up):
    """While a stream runs through all of it, between what `status` and `generate` say and a clean end."""
    check_status(up)
    check_generate(up)
    before = up.pids()
    story = Story([router["endpoint"] for router in up.status()["routers"]])
    for name in ("router-0", "worker-0", "store", "worker-1", "router-1"):  # first the one that carries the story
        pid = up.pids()[name]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not exists(pid), 10, f"{name} lives on")
        is_back = partial(has_come_back, up, name, pid)
        wait_until(is_back, 60, f"{name} does not come back:\n{up.process.tail()}")
        story.goes_on()
    assert story.end() > 0
    assert story.tokens == Oracle("fake").tokens(Story.PROMPT, len(story.tokens))
    assert not set(before.values()) & set(up.pids().values())
    check_end(up)


@pytest.mark.timeout(360)
def test_kill_9_of_up_leaves_nothing_behind_and_a_damaged_store_ends_the_next(tmp_path):
    up = Up(tmp_path, routers=1, workers=1)
    children = up.children()
    assert len(children) == 3
    up.process.kill()
    for pid in children:
        wait_until(lambda pid=pid: not exists(pid), STOP_S, f"process {pid} is left")
    again = Up(tmp_path, routers=1, workers=1)  # nothing in the way: neither lock, nor port, nor state
    wait_until(again.whole, 60, again.process.tail())
    check_damaged_store(again)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_signals", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_process_that_does_not_answer_keeps_up_from_no_quick_end(tmp_path, num_signals):
    """It is killed 2.5 s after the first signal, or at the second one. So is the store, soon after those who use it."""
    up = Up(tmp_path, routers=1, workers=1)
    children, started = up.children(), up.pids()
    os.kill(started["worker-0"], signal.SIGSTOP)
    os.kill(started["store"], signal.SIGSTOP)
    began = time.monotonic()
    os.kill(up.process.pid, signal.SIGINT)
    wait_until(lambda: "ending" in up.process.log.read_text(), 10, "it does not end")
    if num_signals == 2:
        os.kill(up.process.pid, signal.SIGINT)
    wait_until(lambda: not up.process.running, STOP_S, "it does not end")
    assert up.process.exit_code == 0
    assert time.monotonic() - began < 9  # 3 s on a quiet machine
    assert ("killing" in up.process.log.read_text()) == (num_signals == 2)
    assert not [pid for pid in children if exists(pid)]
