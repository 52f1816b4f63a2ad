"""The calls of hosts at a start, and strangers who call meanwhile: over real sockets, in TLS or not."""

import json
import socket
import threading
import time
from contextlib import closing

import pytest
from certificates import Certificates
from live.process import wait_until

from gpu_worker.group.hosts import host_streams
from gpu_worker.group.hosts.host_streams import COLUMNS, WORDS, HostPlace, HostStreams, take_calls
from octavo.wire.endpoint import Endpoint

SECRET = "of this group"


@pytest.mark.parametrize("secured", [False, True])
def test_strangers_keep_no_host_waiting(secured, tmp_path, monkeypatch):
    """Who says nothing, who says a byte at a time, and who says something else: all are left, and in time."""
    monkeypatch.setattr(host_streams, "CALL_S", 2.0)
    tls = Certificates(tmp_path).files("worker") if secured else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(5)]
        strangers[0].sendall(b'{"host": 1, "kind": "words", "secret": "guessed"}\n')
        left = threading.Event()
        threading.Thread(target=_drip, args=(strangers[1], left), daemon=True).start()
        streams = HostStreams(HostPlace(0, 2, Endpoint("127.0.0.1", 1)))
        caller = threading.Thread(target=_call, args=(address, tls, made := []), daemon=True)
        caller.start()
        take_calls(listener, streams, tls, SECRET)
        caller.join(30)
        assert (set(streams.words), set(streams.columns)) == ({1}, {1})
        with closing(streams), closing(made[0]), closing(made[1]):
            assert [streams.words[1].recv(9), streams.columns[1].recv(9)] == [b"words", b"columns"]
        wait_until(left.is_set, 30, "a stranger is not left")
        for each in strangers:
            each.settimeout(30)
            with closing(each):
                try:
                    while each.recv(100):
                        pass
                except ConnectionError:
                    pass
    wait_until(lambda: not any(each.name.startswith("group") for each in threading.enumerate()), 30, "a thread stays")


def _drip(stream, left):
    try:
        while True:
            stream.sendall(b" ")
            time.sleep(0.05)
    except OSError:
        left.set()


def _call(address, tls, made):
    """What the other host does."""
    for kind in (WORDS, COLUMNS):
        greeting = json.dumps({"host": 1, "kind": kind, "secret": SECRET}) + "\n"
        made.append(host_streams._opened(socket.create_connection(address), tls, greeting))
        made[-1].sendall(kind.encode())
