"""No command waits in silence: a wrong endpoint is told after a second, and given up after --timeout."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from octavo.cli import main

QUESTIONS = [["generate", "hi"], ["chat"]]


def test_a_closed_connection_may_mean_tls(capsys):
    closed = threading.Event()

    def close(listener):
        while not closed.is_set():
            with suppress(TimeoutError):
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as closing:
        listener.settimeout(0.05)
        closing.submit(close, listener)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main([*QUESTIONS[0], f"--endpoint={endpoint}", "--timeout=1.5"]) == 1  # time for one connection
        closed.set()
    assert "give --tls-ca if routers use TLS, correct --endpoint" in capsys.readouterr().err


def test_an_http_server_is_told_from_a_router(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as answering:

        def answer():
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering.submit(answer)
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main([*QUESTIONS[0], f"--endpoint={endpoint}", "--timeout=1.5"]) == 1
    assert "what answers there speaks HTTP/1: give --endpoint a router's port of gRPC" in capsys.readouterr().err


@pytest.mark.parametrize("command", QUESTIONS)
def test_an_endpoint_that_is_silent(capsys, command):
    """It takes connections and never says a word, as a process that hangs does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        assert main([*command, f"--endpoint={silent}", "--timeout=0.3"]) == 1
    (end,) = capsys.readouterr().err.splitlines()
    assert "not connected within 0.3 s" in end
