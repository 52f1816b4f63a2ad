"""`octavo migrate`: what it asks of a router, and what it says."""

import json

import pytest

from octavo.cli import main


def test_what_moved_is_told(router, endpoint, capsys):
    assert main(["migrate", "r", "--admin-endpoint", endpoint]) == 0
    says = "r runs on worker-1 now: 7 of 9 blocks (28 KiB) were sent, stopped for 3 ms of 42 ms\n"
    assert capsys.readouterr().out == says
    assert main(["migrate", "r", "--to", "worker-7", "--json", "--admin-endpoint", endpoint]) == 0
    expected = {"request_id": "r", "worker_id": "worker-7", "epoch": 3, "num_blocks": 9, "num_sent_blocks": 7}
    expected |= {"num_sent_bytes": 28672, "total_ms": 41.5, "stopped_ms": 3.25}
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["migrate", "long", "--admin-endpoint", endpoint]) == 0
    assert "the request runs on until its blocks are there" in capsys.readouterr().err
    assert router.migrations[:2] == [("r", ""), ("r", "worker-7")]


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["x"], "request_id: there is no such request", 1),
        (["waits"], "the request waits in the queue", 1),
        ([], "REQUEST_ID is missing: the request to move", 2),
    ],
)
def test_the_last_line_says_what_is_wrong(router, endpoint, capsys, words, says, code):
    assert main(["migrate", *words, "--admin-endpoint", endpoint]) == code
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_refusal_of_the_first_router_counts(router, endpoint):
    assert main(["migrate", "waits", "--admin-endpoint", f"{endpoint},{endpoint}"]) == 1
    assert router.migrations == [("waits", "")]
