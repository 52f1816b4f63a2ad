"""A request that waits for a worker is no silence: stderr is told what it waits for."""

import io
import re

import pytest

from octavo.cli import main, queue_notice
from octavo.v1 import inference_pb2

QUEUED, RUNNING = inference_pb2.REQUEST_STATE_QUEUED, inference_pb2.REQUEST_STATE_RUNNING
TOLD = r"octavo {}: request (\S+) waits in the queue: no worker has taken it; `octavo status` says why, .*"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(queue_notice, "INTERVAL_S", 0.02)


@pytest.mark.parametrize("flags", [[], ["--json"], ["--n=2"], ["--request-id=mine"]])
def test_a_request_that_waits_is_told_once(router, endpoint, capsys, flags):
    router.states = [QUEUED] * 5
    assert main(["generate", f"--endpoint={endpoint}", "hi", *flags]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    asked = re.fullmatch(TOLD.format("generate"), line)[1]
    assert set(router.asked) == {asked}
    assert "Paris" in captured.out
    if "--request-id=mine" in flags:
        assert asked == "mine"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_chat_tells_it_too(router, endpoint, capsys, monkeypatch, flags):
    router.states = [QUEUED] * 3
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", f"--endpoint={endpoint}", *flags]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(TOLD.format("chat"), captured.err.strip())
    assert "Paris" in captured.out


def test_one_that_waits_again_is_told_again(router, endpoint, capsys):
    router.states = [QUEUED, QUEUED, RUNNING, RUNNING, QUEUED, QUEUED, QUEUED]
    assert main(["generate", f"--endpoint={endpoint}", "hi"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("states", [[], [RUNNING] * 4])
def test_one_that_runs_or_has_gone_is_no_news(router, endpoint, capsys, states):
    router.states = states
    assert main(["generate", f"--endpoint={endpoint}", "hi"]) == 0
    assert capsys.readouterr().err == ""
