"""No command waits in silence: a wrong endpoint is told after a second, and given up after --timeout."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from octavo.cli import connection, main
from octavo.client import endpoint_pool
from octavo.request.errors import Unreachable

QUESTIONS = [["generate", "hi"], ["chat"]]


@pytest.mark.parametrize("command", QUESTIONS)
def test_an_endpoint_where_nobody_listens(capsys, monkeypatch, command):
    monkeypatch.setattr(endpoint_pool, "REASON_TIMEOUT_S", 20.0)  # a busy machine has the answer later
    monkeypatch.setattr(connection, "NOTICE_S", 0.0)
    assert main([*command, "--endpoint=127.0.0.1:1", "--timeout=0.4"]) == 1
    notice, end = capsys.readouterr().err.splitlines()
    assert notice == f"octavo {command[0]}: 127.0.0.1:1: no answer yet; retrying, for 0.4 s in all"
    assert "not connected within 0.4 s" in end
    assert "Connection refused" in end
    assert end.endswith("correct --endpoint, or wait longer with --timeout")


def test_a_closed_connection_may_mean_tls(capsys):
    closed = threading.Event()

    def close(listener: socket.socket) -> None:
        while not closed.is_set():
            with suppress(TimeoutError):
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as closing:
        listener.settimeout(0.05)
        closing.submit(close, listener)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main([*QUESTIONS[0], f"--endpoint={endpoint}", "--timeout=0.4"]) == 1
        closed.set()
    assert "give --tls-ca if routers use TLS, correct --endpoint" in capsys.readouterr().err


def test_each_trouble_of_a_call_is_told_once(capsys):
    notice = connection.RetryNotice("generate")
    for trouble_s in (0.0, 0.9, 1.1, 3.0, 0.0, 0.5, 2.0):
        notice.retrying(Unreachable("gone"), trouble_s)
    assert capsys.readouterr().err == "octavo generate: gone; retrying\n" * 2
