"""What hosts and ranks say to the front, however the network cuts it, and what follows if it is not understood."""

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from live.process import wait_until

from gpu_worker.group import rank_watch
from gpu_worker.group.hosts import follower, host_connection
from gpu_worker.group.hosts.follower import Follower
from gpu_worker.group.hosts.host_connection import LEAVE, HostConnection
from gpu_worker.group.hosts.host_streams import HostPlace, HostStreams
from gpu_worker.group.rank_task import RankWord
from gpu_worker.group.rank_watch import RankWatch
from octavo.wire.endpoint import Endpoint

Streams = tuple[socket.socket, socket.socket]


@pytest.fixture
def streams() -> Iterator[Streams]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def follower_of(stream: socket.socket) -> Follower:
    made = Follower(HostPlace(1, 2, Endpoint("here", 1)), None)
    made._front = stream
    return made


def reset(stream: socket.socket) -> None:
    """As the kernel ends the streams of a process that was killed before it had read all."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


@pytest.mark.parametrize("size", [1, 3, len(LEAVE) - 1, 1000])
def test_words_that_come_in_pieces_are_heard_whole(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Above all the wish to leave, between two words of ranks."""
    near, far = streams
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(HostConnection, "_leaves", False)
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.append((pid, number)))
    words = [(RankWord(rank=number, numerics="x" * 40).to_json() + "\n").encode() for number in range(2)]
    connection, heard = HostConnection(1, [0, 1], near), b""
    said = words[0] + LEAVE + words[1]
    for start in range(0, len(said), size):
        far.sendall(said[start : start + size])
        heard += connection.read()
    far.close()
    while more := connection.read():
        heard += more
    assert [line for line in heard.splitlines(keepends=True) if line != b"\n"] == words
    assert asked == [(os.getpid(), signal.SIGTERM)]


def test_a_host_that_says_nothing_of_itself_is_named(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connection, "HELLO_S", 0.2)
    with pytest.raises(OSError, match=r"^host 1 has come, and has not said what it has for 0.2 s$"):
        HostConnection(1, [1], streams[0]).hear_hello()


@pytest.mark.parametrize("word", [b"no word\n", b"{}\n", b"[1]\n", b'{"block_bytes": null}\n'])
def test_a_host_of_another_version_is_named_at_once(streams: Streams, word: bytes) -> None:
    near, far = streams
    far.sendall(word)
    with pytest.raises(OSError, match=r"^host 1 says what no host says: all need the same version"):
        HostConnection(1, [1], near).hear_hello()


def test_a_front_that_does_not_say_what_to_do_is_waited_for_no_longer_than_a_meeting(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = HostPlace(1, 2, Endpoint("here", 1))
    monkeypatch.setattr(follower, "MEETING_S", 0.2)
    monkeypatch.setattr(follower, "meet_hosts", lambda *_: HostStreams(place, words={0: streams[0]}))
    with pytest.raises(OSError, match=r"^the front has not said what to do for 0.2 s$"):
        Follower(place, None).run()


@pytest.mark.parametrize("word", [b"no word\n", b'{"rank": 1, "new": 1}\n', b'{"rank": 7}\n', b"[1]\n"])
def test_a_host_that_is_not_understood_ends_the_group(streams: Streams, word: bytes) -> None:
    """The thread that watches does not end by it, so that nobody would watch."""
    near, far = streams
    losses: list[int] = []
    watch = RankWatch([HostConnection(1, [1], near)], 5.0, lambda: losses.append(1))
    far.sendall(word)
    wait_until(lambda: bool(watch.loss), 10, "nothing follows")
    assert watch.loss == "rank 1 says what no rank says: all need the same version"
    watch.close()
    assert not watch._thread.is_alive()
    assert losses == [1]


@pytest.mark.parametrize("word", [{"has_loaded": True}, {"numerics": "x"}])
def test_the_rank_for_which_others_wait_is_named(streams: Streams, monkeypatch: pytest.MonkeyPatch, word: dict) -> None:
    """Not before rank 0 has loaded: until then nobody is late."""
    near, far = streams
    monkeypatch.setattr(rank_watch, "LOADING_S", 0.2)
    ended = threading.Event()
    watch = RankWatch([HostConnection(1, [1, 2], near)], 5.0, ended.set)
    watch._tick_s = 0.05
    far.sendall((RankWord(rank=1, **word).to_json() + "\n").encode())
    assert not ended.wait(0.5)
    watch.expect_ready()
    assert ended.wait(10)
    assert watch.loss.startswith("rank 2 is not ready 0.2 s after rank 0 has loaded its model")
    watch.close()


def test_a_front_that_was_killed_with_words_unread_has_ended(streams: Streams) -> None:
    near, far = streams
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(follower_of(near)._relay(near, [], 60.0)))
    thread.start()
    near.sendall(b"a word that nobody reads\n")
    reset(far)
    thread.join(10)
    assert said == ["the front has ended"]


@pytest.mark.parametrize("ask", [Follower.ask_to_leave, Follower.end])
def test_a_host_is_asked_to_go_when_the_front_has_just_ended(streams: Streams, ask: Callable[[Follower], bool]) -> None:
    near, far = streams
    reset(far)
    asked = follower_of(near)
    for _ in range(3):
        assert ask(asked)
