"""`octavo drain`: what it asks of a router, or of the worker that runs here, and what it says."""

import json

import pytest
from certificates import Certificates
from scripted_router import served

from octavo.cli import main
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request import errors


def test_a_drain_is_reported_with_its_progress(router, endpoint, capsys):
    words = ["drain", "worker-0", "--admin-endpoint", endpoint]
    assert main([*words, "--grace", "2.5"]) == 0
    told = capsys.readouterr()
    assert told.out == "worker-0 is drained. Sequences moved with their blocks: 1, released: 1, left: 0\n"
    assert [line.rpartition("sequences left: ")[2] for line in told.err.splitlines()] == ["2", "1", "0"]
    assert main([*words, "--undo"]) == 0
    assert capsys.readouterr().out == "worker-0 gets sequences again\n"
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    counts = {"num_left": 0, "num_migrated": 1, "num_released": 1}
    assert json.loads(told.out) == {"worker_id": "worker-0", "draining": True, **counts}
    assert not told.err
    assert router.drains == [("worker-0", 2500, False), ("worker-0", 60_000, True), ("worker-0", 60_000, False)]


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
        (["worker-0", "--admin-endpoint", "127.0.0.1:1", "--timeout", "0.5"], "127.0.0.1:1: ", 1),
    ],
)
def test_the_last_line_says_what_is_wrong(router, endpoint, capsys, words, says, code):
    assert main(["drain", "--admin-endpoint", endpoint, *words]) == code
    assert says in capsys.readouterr().err.splitlines()[-1]


# ---- --self: the worker that runs here, by the variables that it was started with


class Worker(worker_pb2_grpc.WorkerServicer):
    def __init__(self):
        self.drains = []
        self.loads = False

    async def Drain(self, request, context):
        if self.loads:
            raise errors.Loading("the model is not loaded yet", retry_after_ms=100)
        self.drains.append((request.grace_ms, request.undo))
        for left in (3, 3, 0):
            yield worker_pb2.DrainResponse(num_left=left, num_migrated=3 - left, num_released=0)


def serving(worker, tls=None):
    return served((worker_pb2_grpc.add_WorkerServicer_to_server, worker), tls=tls, internal=True)


@pytest.fixture
def worker(monkeypatch):
    made = Worker()
    with serving(made) as address:
        monkeypatch.setenv("OCTAVO_WORKER_LISTEN", address)
        monkeypatch.setenv("OCTAVO_WORKER_ID", "pod-0")
        yield made


def test_the_worker_here_is_drained_without_a_router(worker, capsys):
    assert main(["drain", "--self", "--grace", "7"]) == 0
    told = capsys.readouterr()
    assert told.out == "pod-0 is drained. Sequences moved with their blocks: 3, released: 0, left: 0\n"
    assert [line.rpartition(": ")[2] for line in told.err.splitlines()] == ["3", "0"]
    assert main(["drain", "--self", "--undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker_id"] == "pod-0"
    assert worker.drains == [(7000, False), (60_000, True)]


def test_it_shows_the_certificate_of_the_worker(tmp_path, monkeypatch, capsys):
    certificates, made = Certificates(tmp_path / "tls"), Worker()
    with serving(made, certificates.files("worker")) as address:
        monkeypatch.setenv("OCTAVO_WORKER_LISTEN", address)
        for role, code in (("worker", 0), ("client", 1)):
            for name, file in certificates.settings(role).items():
                monkeypatch.setenv(f"OCTAVO_WORKER_{name.upper()}", file)
            assert main(["drain", "--self"]) == code, capsys.readouterr().err
    assert "the certificate's role is client" in capsys.readouterr().err
    assert len(made.drains) == 1


def test_a_worker_that_cannot_be_drained(worker, monkeypatch, capsys):
    worker.loads = True
    for variables, code, says in (
        ({}, 1, "the model is not loaded yet"),
        ({"LISTEN": "127.0.0.1:1"}, 1, "127.0.0.1:1: "),
        ({"TLS_CERT": "/none", "TLS_KEY": "/none"}, 1, "/none"),
        ({"LISTEN": "nowhere"}, 2, "nowhere"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(f"OCTAVO_WORKER_{name}", value)
        assert main(["drain", "--self", "--timeout", "0.5"]) == code
        assert says in capsys.readouterr().err.splitlines()[-1]
