"""A request that waits for a worker is no silence: stderr is told what it waits for."""

import json
import re

import pytest

from octavo.cli import main
from octavo.cli.requests import answers
from octavo.v1 import inference_pb2, types_pb2

QUEUED, RUNNING = inference_pb2.REQUEST_STATE_QUEUED, inference_pb2.REQUEST_STATE_RUNNING
TOLD = r"octavo {}: request (\S+) waits in the queue: no worker has taken it; `octavo status` says why, .*"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(answers, "QUEUE_INTERVAL_S", 0.02)


@pytest.mark.parametrize("flags", [["--json"], ["--n=2", "--request-id=mine"]])
def test_a_request_that_waits_is_told_once(router, endpoint, capsys, flags):
    router.states = [QUEUED] * 5
    assert main(["generate", f"--endpoint={endpoint}", "hi", *flags]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    asked = re.fullmatch(TOLD.format("generate"), line)[1]
    assert set(router.asked) == {asked}
    assert asked == "mine" or "--json" in flags
    assert "Paris" in captured.out


def test_scores_and_ends_are_told(router, endpoint, capsys):
    words = ["generate", f"--endpoint={endpoint}", "hi"]
    assert main([*words, "--json", "--logprobs=1"]) == 0
    assert json.loads(capsys.readouterr().out)["logprobs"][0]["chosen"] == {"token_id": 0, "logprob": -0.5}
    router.finish_reason = types_pb2.FINISH_REASON_LENGTH
    assert main([*words, "--max-tokens=9"]) == 0
    assert "cut after 4 tokens, where the model's context ends" in capsys.readouterr().err


@pytest.mark.parametrize("states", [[], [RUNNING] * 4])
def test_running_or_gone_requests_are_no_news(router, endpoint, capsys, states):
    router.states = states
    assert main(["generate", f"--endpoint={endpoint}", "hi"]) == 0
    assert capsys.readouterr().err == ""
