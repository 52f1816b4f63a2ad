"""`octavo drain`: what it asks of a router, and what it says."""

import json

import pytest

from octavo.cli import main


def test_a_drain_is_reported_with_its_progress(router, endpoint, capsys):
    assert main(["drain", "worker-0", "--admin-endpoint", endpoint, "--grace", "2.5"]) == 0
    told = capsys.readouterr()
    assert told.out == "worker-0 is drained. Sequences moved with their blocks: 1, released: 1, left: 0\n"
    assert [line.rpartition("sequences left: ")[2] for line in told.err.splitlines()] == ["2", "1", "0"]
    assert router.drains == [("worker-0", 2500, False)]


def test_an_undone_drain_and_json(router, endpoint, capsys):
    assert main(["drain", "worker-0", "--undo", "--admin-endpoint", endpoint]) == 0
    assert capsys.readouterr().out == "worker-0 gets sequences again\n"
    assert main(["drain", "worker-0", "--json", "--admin-endpoint", endpoint]) == 0
    told = capsys.readouterr()
    counts = {"num_left": 0, "num_migrated": 1, "num_released": 1}
    assert json.loads(told.out) == {"worker_id": "worker-0", "draining": True, **counts}
    assert not told.err
    assert router.drains == [("worker-0", 60_000, True), ("worker-0", 60_000, False)]


def test_another_router_may_know_the_worker(router, endpoint, capsys):
    router.forgets = 1
    assert main(["drain", "worker-0", "--admin-endpoint", f"{endpoint},{endpoint}", "--json"]) == 0
    router.forgets = 2
    assert main(["drain", "worker-0", "--admin-endpoint", f"{endpoint},{endpoint}"]) == 1
    assert "this router knows no worker" in capsys.readouterr().err.splitlines()[-1]
    assert len(router.drains) == 4


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["x"], "worker_id: this router knows no worker 'x'", 1),
        (["worker-0", "--grace", "4000"], "--grace: at most 3600 seconds", 1),
        (["worker-0", "--grace", "0"], "no number of seconds above 0", 2),
        ([], "name a WORKER, as `octavo status` shows it, or give --self", 1),
        (["worker-0", "--self"], "name a WORKER, as `octavo status` shows it, or give --self", 1),
    ],
)
def test_the_last_line_says_what_is_wrong(router, endpoint, capsys, words, says, code):
    assert main(["drain", *words, "--admin-endpoint", endpoint]) == code
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_no_router_that_answers(capsys):
    assert main(["drain", "worker-0", "--admin-endpoint", "127.0.0.1:1", "--timeout", "0.5"]) == 1
    assert "127.0.0.1:1: " in capsys.readouterr().err.splitlines()[-1]
