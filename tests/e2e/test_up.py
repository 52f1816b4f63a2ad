"""`octavo up` itself: what it starts it keeps alive, and takes down with it, however it ends."""

import json
import os
import signal
import subprocess
import threading
import time
import uuid

import pytest
from guard.processes import exists
from live.oracle import Oracle
from live.process import wait_until
from live.up import STOP_S, Up

from octavo.client import Client, FinishReason, RetryPolicy, SamplingParams

STORY_PATIENCE_S = 120.0


def start(folder, routers=1, workers=1, *options, form="--json"):
    fake = ("--runner", "fake", "--step-delay-ms", 10, "--lease-ms", 2000)
    return Up(folder, "--routers", routers, "--workers", workers, *fake, *options, form=form)


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


def has_come_back(up, name, old_pid):
    """Whether all is whole with another process of that name: `octavo up` notices an end a moment later."""
    time.sleep(0.2)  # what is awaited needs the processor more than whoever asks
    status = up.status()
    return is_whole(status) and pids(status)[name] not in (old_pid, None)


def wait_gone(children):
    wait_until(lambda: not any(map(exists, children)), STOP_S, f"of processes {children} some are left")


def check_status(up):
    status = up.run("status")
    assert [router["router_id"] for router in status["routers"]] == ["router-0", "router-1"]
    assert [worker["worker_id"] for worker in status["workers"]] == ["worker-0", "worker-1"]
    for worker in status["workers"]:
        assert {"incarnation", "endpoint", "num_sequences"} <= worker.keys()
        blocks = worker["blocks"]
        assert blocks["free"] + blocks["used"] + blocks["cached"] == blocks["total"] == 1024
    assert set(pids(status).values()) == set(up.programs())
    assert len(up.children()) == len(up.programs()), "without --standby no worker has a keeper of its memory"


def check_generate(up):
    options = ["--max-tokens", 12, "--temperature", 0.5, "--seed", 5]
    first = up.run("generate", "--prompt", "Once upon", *options)
    assert first.keys() >= {"text", "token_ids", "finish_reason", "usage", "num_reattaches"}
    assert len(first["token_ids"]) == 12
    endpoints = ",".join(router["endpoint"] for router in reversed(up.status()["routers"]))
    again = up.run("generate", "--prompt", "Once upon", *options, "--endpoint", endpoints)
    assert (again["text"], again["token_ids"]) == (first["text"], first["token_ids"])


def check_banner(text):
    """Each command that it shows gives the answer that it shows."""
    told = [line.strip() for line in text.splitlines()]
    (sample,) = (line.removeprefix("sample").strip() for line in told if line.startswith("sample"))
    commands = [line for line in told if line.endswith(("Complete", "}'", "--temperature 0"))]
    assert len(commands) == 3
    for command in commands:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout) if done.stdout.startswith("{") else {"outputs": [{"text": done.stdout[:-1]}]}
        (output,) = found.get("outputs") or found["choices"]
        assert sample == "Gravity is" + repr(output["text"])[1:-1], command


class Story:
    """A stream that is read beside the test: longer than anything the test does in the meantime, on any machine that
    gets through it, and cancelled when it has been through all of it."""

    PROMPT = b"A long story"

    def __init__(self, endpoints):
        self._client = Client(endpoints, policy=RetryPolicy(progress_timeout_s=STORY_PATIENCE_S))
        params = SamplingParams(temperature=0, max_tokens=8000)
        self._stream = self._client.generate(self.PROMPT, params, request_id=f"story-{uuid.uuid4()}")
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
def test_what_dies_is_started_again_and_takes_part(tmp_path):
    """While a stream runs through all of it, between what `status` and `generate` say and a clean end."""
    up = start(tmp_path, 2, 2)
    check_status(up)
    check_generate(up)
    before = pids(up.status())
    story = Story([router["endpoint"] for router in up.status()["routers"]])
    for name in ("router-0", "worker-0", "store", "worker-1", "router-1"):  # first the one that carries the story
        pid = pids(up.status())[name]
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid])
        wait_until(lambda name=name, pid=pid: has_come_back(up, name, pid), 60, f"{name}:\n{up.process.tail()}")
        story.goes_on()
    assert story.end() > 0
    assert story.tokens == Oracle("fake").tokens(Story.PROMPT, len(story.tokens))
    assert not set(before.values()) & set(pids(up.status()).values())
    assert up.stop() == 0
    assert not (up.state_dir / "state.json").exists()


@pytest.mark.timeout(360)
def test_kill_9_of_up_leaves_nothing_behind_and_a_damaged_store_ends_the_next(tmp_path):
    up = start(tmp_path)
    children = up.children()
    assert len(up.programs()) == 3
    up.process.kill()
    wait_gone(children)
    up = start(tmp_path)  # nothing in the way: neither lock, nor port, nor state
    wait_until(lambda: is_whole(up.status()), 60, up.process.tail())
    # A store whose file is damaged ends everything, and tells the remedy.
    children, store = up.children(), pids(up.status())["store"]
    (written,) = (up.state_dir / "store" / "appendonlydir").glob("*.incr.aof")
    data = bytearray(written.read_bytes())
    data[20:40] = b"?" * 20
    written.write_bytes(data)
    os.kill(store, signal.SIGKILL)
    wait_until(lambda: not up.process.running, STOP_S, "octavo up goes on without a store")
    wait_gone(children)
    text = up.process.log.read_text()
    assert up.process.exit_code == 1
    assert text.count("is damaged") == 1
    assert "valkey-check-aof" in text.splitlines()[-1]
    assert f"rm -r {up.state_dir / 'store'}" in text.splitlines()[-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_signals", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_process_that_does_not_answer_keeps_up_from_no_quick_end(tmp_path, num_signals):
    """It is killed 2.5 s after the first signal, or at the second one. So is the store, soon after those who use it.

    Before, somebody does what it says, with the certificates that it has made.
    """
    up = start(tmp_path, 1, 1, "--secure", form="")
    check_banner(up.process.log.read_text())
    children, started = up.children(), pids(up.status())
    for name in ("worker-0", "store"):
        os.kill(started[name], signal.SIGSTOP)
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
