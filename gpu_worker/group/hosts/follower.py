"""The program of a host other than the front's: it starts the ranks there, and says what they say to the front.

It lives as long as the front does, and ends its ranks when that has ended or says nothing.
"""

import asyncio
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gpu_worker.group.hosts.host_connection import LEAVE
from gpu_worker.group.hosts.host_streams import MEETING_S, HostPlace, HostStreams, meet_hosts
from gpu_worker.group.rank_process import RankProcess
from gpu_worker.group.rank_task import RankTask, RankWord
from gpu_worker.group.rank_watch import SILENT_LEASES
from gpu_worker.group.shared_memory import memory_of_ranks
from gpu_worker.running.sizing import cpu_block_bytes
from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.protection import tls_of
from octavo.process.loop import StopRequest
from octavo.process.machine import available_bytes
from octavo.settings.worker import WorkerSettings

log = logging.getLogger(__name__)
FRONT = 0
GONE_STATUS = 1
REAPED_S = 5.0  # what was killed has ended in milliseconds, unless the kernel holds it


async def follow(settings: WorkerSettings, stop: StopRequest) -> int:
    """Runs the ranks of this host until the front has ended. Returns the process's exit status.

    SIGTERM has the front drain; this host stays until that has ended. SIGINT, or a second SIGTERM, ends it at once.
    """
    follower = Follower(HostPlace.of(settings), tls_of(settings))
    running = asyncio.create_task(asyncio.to_thread(follower.run))
    for asked, what in ((stop.asked, follower.ask_to_leave), (stop.urgent, follower.end)):
        asking = asyncio.create_task(asked.wait())
        await asyncio.wait({running, asking}, return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        if running.done():
            break
        if not what():  # there is no front yet: nothing to wait for, and the thread cannot be interrupted
            log.info("asked to end while starting")
            os._exit(0)
    try:
        log.info("%s: this host of the group ends", await running)
    except OSError as error:
        log.error("this host of the group ends: %s", error)
        return GONE_STATUS
    return 0 if stop.asked.is_set() else GONE_STATUS


class Follower:
    """One host's ranks. `run` blocks in a thread of its own, which has to live as long as they do."""

    def __init__(self, place: HostPlace, tls: ListenerTls | None) -> None:
        self._place = place
        self._tls = tls
        self._front: socket.socket | None = None
        self._turn = threading.Lock()

    def run(self) -> str:
        """Why it has ended. Raises OSError if the hosts do not meet, or the front does not say what to do."""
        streams = meet_hosts(self._place, self._tls)
        front = streams.words[FRONT]
        front.sendall(_line({"block_bytes": cpu_block_bytes(available_bytes())}))
        self._front = front  # not earlier: the front takes no other word for the first one
        front.settimeout(MEETING_S)
        try:
            with front.makefile("rb", buffering=0) as words:
                line = words.readline()
        except TimeoutError:
            raise OSError(f"the front has not said what to do for {MEETING_S:g} s") from None
        finally:
            front.settimeout(None)
        if not line.endswith(b"\n"):
            return "the front has ended before it said what to do"
        try:
            task = RankTask.from_json(line.decode())
        except (ValueError, TypeError, KeyError) as error:
            raise OSError(f"the front says what this host does not know: all need the same version ({error})") from None
        with memory_of_ranks() as memory:
            count = task.size // task.hosts
            first = replace(task, **memory, links=streams.column_fds())
            tasks = [first, *(replace(first, rank=task.rank + i, links=()) for i in range(1, count))]
            return self._serve(tasks, streams)

    def ask_to_leave(self) -> bool:
        """Asks the front to drain, if there is one: if it has ended just now, so does `run`. From any thread."""
        if self._front is None:
            return False
        self._write(LEAVE)
        return True

    def end(self) -> bool:
        """Ends the ranks, and `run`, at once. From any thread."""
        if self._front is not None:
            with suppress(OSError):  # the front has ended it
                self._front.shutdown(socket.SHUT_RDWR)
        return self._front is not None

    def _serve(self, tasks: Sequence[RankTask], streams: HostStreams) -> str:
        ranks = [RankProcess(task) for task in tasks]
        try:
            for rank in ranks:
                rank.start()
            for stream in streams.columns.values():
                stream.close()  # the first rank has it
            return self._relay(streams.words[FRONT], ranks, SILENT_LEASES * tasks[0].patience_s)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.reap(REAPED_S)

    def _relay(self, front: socket.socket, ranks: Sequence[RankProcess], patience_s: float) -> str:
        """Until the front or a rank has ended."""
        rests = dict.fromkeys(ranks, b"")
        silent_s, turned, tick_s = 0.0, time.monotonic(), patience_s / 10
        with selectors.DefaultSelector() as selector:
            selector.register(front, selectors.EVENT_READ)
            for rank in ranks:
                selector.register(rank, selectors.EVENT_READ, rank)
            while silent_s < patience_s:
                for key, _ in selector.select(tick_s):
                    if key.data is None:
                        if not _heard(front):
                            return "the front has ended"
                        silent_s = 0.0
                        continue
                    data = key.data.read()
                    if not data:
                        how = key.data.ending()
                        number = key.data.ranks[0]
                        self._write((RankWord(rank=number, failure=how).to_json() + "\n").encode())
                        return f"rank {number}: {how}"
                    whole, _, rests[key.data] = (rests[key.data] + data).rpartition(b"\n")
                    if whole:
                        self._write(whole + b"\n")
                now = time.monotonic()
                silent_s += min(now - turned, tick_s)
                turned = now
        return f"the front has said nothing for {patience_s:g} s"

    def _say(self, word: dict[str, Any]) -> None:
        self._write(_line(word))

    def _write(self, data: bytes) -> None:
        """What a front that has ended is told is lost: `run` sees its end."""
        with self._turn, suppress(OSError):
            if self._front is not None:
                self._front.sendall(data)


def _line(word: dict[str, Any]) -> bytes:
    return (json.dumps(word) + "\n").encode()


def _heard(front: socket.socket) -> bytes:
    """What the front has said; nothing if it has ended. One that was killed may reset the stream."""
    try:
        return front.recv(4096)
    except OSError:
        return b""
