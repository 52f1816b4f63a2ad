"""The connections between the hosts of a group: who finds whom by torch's rendezvous, and what passes, in TLS or not.

Between host 0, the front's, and each other one there is a stream of words (rank_task) and one of columns
(csrc/include/octavo/host_links.h); between two others there is one of columns. Host i calls those before it.
"""

import json
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from octavo.net.security.listener_tls import ListenerTls
from octavo.net.security.tls_socket import TlsSocket, shake_hands
from octavo.request.errors import InvalidArgument
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import Endpoint, parse_endpoint

log = logging.getLogger(__name__)
MEETING_S = 600.0  # how long hosts wait for each other at a start
CALL_S = 10.0  # how long a caller may take to say who it is, in all
MOST_CALLS = 256  # that have not said it yet: each has a thread
TICK_S = 0.05
MOST_GREETING = 4096
WORDS, COLUMNS = "words", "columns"


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Which host of its group this one is, and where they meet."""

    host: int
    hosts: int
    meeting: Endpoint
    life: int = 0  # how often the group was started again

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """As torchrun says it. InvalidArgument where nothing has."""
        if settings.hosts < 2 or settings.host_rank not in range(settings.hosts) or not settings.meeting_at:
            raise InvalidArgument(
                "launcher",
                "MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE do not say which of several hosts this is: start with"
                " torchrun or in a LeaderWorkerSet, or set them",
            )
        if settings.local_world_size != 1:
            raise InvalidArgument(
                "launcher", "each host has one process, which starts its ranks itself: --nproc-per-node 1"
            )
        return cls(settings.host_rank, settings.hosts, parse_endpoint(settings.meeting_at), settings.meeting_life)


@dataclass(slots=True)
class HostStreams:
    """The open streams of this host. Those of columns are descriptors that ranks may be given."""

    place: HostPlace
    words: dict[int, socket.socket] = field(default_factory=dict)  # by the other host
    columns: dict[int, socket.socket] = field(default_factory=dict)

    def column_fds(self) -> list[int]:
        """By host; -1 for this one."""
        return [self.columns[host].fileno() if host in self.columns else -1 for host in range(self.place.hosts)]

    def close(self) -> None:
        for stream in (*self.words.values(), *self.columns.values()):
            stream.close()


def meet_hosts(place: HostPlace, tls: ListenerTls | None) -> HostStreams:
    """Waits for all hosts, and connects this one with them. Raises OSError if one does not come."""
    store = _rendezvous(place)
    streams = HostStreams(place)
    address = _address_towards(place.meeting.host.strip("[]"), place.meeting.port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        if place.host == 0:
            store.set("secret", secrets.token_hex(16))
        store.set(f"host{place.host}", json.dumps([address, listener.getsockname()[1]]))
        secret = store.get("secret").decode()
        # All are asked for before the first call: the front, which holds the rendezvous, ends it once all have called.
        before = [json.loads(store.get(f"host{other}")) for other in range(place.host)]
        for other, (at, port) in enumerate(before):
            for kind in (WORDS, COLUMNS) if other == 0 else (COLUMNS,):
                call = socket.create_connection((at, port), timeout=MEETING_S)
                greeting = json.dumps({"host": place.host, "kind": kind, "secret": secret}) + "\n"
                getattr(streams, kind)[other] = _opened(call, tls, greeting)
        take_calls(listener, streams, tls, secret)
    log.info("host %d of %d has met the others", place.host, place.hosts)
    return streams


def _rendezvous(place: HostPlace) -> Any:
    """The store of torch's rendezvous, which the launcher or the first host has at MASTER_ADDR."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    where = f"tcp://{place.meeting.host}:{place.meeting.port}?rank={place.host}&world_size={place.hosts}"
    try:
        found, _, _ = next(rendezvous(where, timeout=timedelta(seconds=MEETING_S)))
    except RuntimeError as error:  # torch has a class of its own for each reason
        raise OSError(f"the hosts of the group do not meet at MASTER_ADDR: {error}") from error
    return PrefixStore(f"octavo/{place.life}", found)


def _address_towards(host: str, port: int) -> str:
    """The address of this machine that others see when it calls a host."""
    family, kind, *_, to = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)  # sends nothing
        return str(probe.getsockname()[0])


def take_calls(listener: socket.socket, streams: HostStreams, tls: ListenerTls | None, secret: str) -> None:
    """Takes the calls of the hosts behind this one, until all have called. Strangers keep nobody waiting, however slow
    they are. Raises OSError if a host does not call in time."""
    place, ends_at = streams.place, time.monotonic() + MEETING_S
    listener.settimeout(TICK_S)
    greeting: list[threading.Thread] = []
    while len(streams.columns) < place.hosts - 1 or (place.host == 0 and len(streams.words) < place.hosts - 1):
        if time.monotonic() > ends_at:
            raise TimeoutError("not all hosts of the group have called the one before them")
        greeting = [each for each in greeting if each.is_alive()]
        if len(greeting) >= MOST_CALLS:
            time.sleep(TICK_S)
            continue
        try:
            call, caller = listener.accept()
        except TimeoutError:
            continue
        given = call, caller[0], streams, tls, secret
        greeting.append(threading.Thread(target=_greet, args=given, name="group call", daemon=True))
        greeting[-1].start()


def _greet(call: socket.socket, caller: str, streams: HostStreams, tls: ListenerTls | None, secret: str) -> None:
    """Takes one call. One of a stranger is closed and forgotten."""
    stream, ends_at = call, time.monotonic() + CALL_S
    try:
        stream = _opened(stream, tls, "")
        greeting = json.loads(_read_line(stream, ends_at))
        if not secrets.compare_digest(greeting["secret"], secret) or greeting["host"] not in range(streams.place.hosts):
            raise ValueError("it does not know the secret")
        {WORDS: streams.words, COLUMNS: streams.columns}[greeting["kind"]][greeting["host"]] = stream
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s called, and is none of the group: %s", caller, error)
        stream.close()


def _read_line(stream: socket.socket, ends_at: float) -> str:
    """The first line of a stream. Raises TimeoutError if it is not whole by then."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MOST_GREETING:
        if (left_s := ends_at - time.monotonic()) <= 0:
            raise TimeoutError("it did not say in time who it is")
        stream.settimeout(left_s)
        if not (more := stream.recv(1)):
            break
        line += more
    stream.settimeout(None)
    return line.decode()


def _opened(call: socket.socket, tls: ListenerTls | None, greeting: str) -> socket.socket:
    """The stream of a call, made or taken, once it is in TLS if it is to be. Who has made it greets."""
    call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = call
    if tls is not None:
        stream = _pumped(shake_hands(call, tls, TICK_S, server_side=not greeting))
    stream.settimeout(None)
    stream.sendall(greeting.encode())
    return stream


def _pumped(connection: TlsSocket) -> socket.socket:
    """A plain stream whose bytes go through a connection in TLS: two threads carry them."""
    near, far = socket.socketpair()

    def close() -> None:
        connection.close()
        far.close()

    going = threading.Barrier(2, action=close)  # both have seen the end

    def outwards() -> None:
        try:
            while data := far.recv(1 << 18):
                rest = memoryview(data)
                while rest:
                    try:
                        rest = rest[connection.sendmsg([rest]) :]
                    except BlockingIOError:
                        continue
        except (OSError, ValueError):
            pass
        _end(connection, far)
        going.wait()

    def inwards() -> None:
        room = memoryview(bytearray(1 << 18))
        try:
            while True:
                try:
                    (count,) = connection.recvmsg_into([room], 0, 0)
                except BlockingIOError:
                    continue
                if not count:
                    break
                far.sendall(room[:count])
        except (OSError, ValueError):
            pass
        _end(connection, far)
        going.wait()

    for work in (outwards, inwards):
        threading.Thread(target=work, name="group tls", daemon=True).start()
    return near


def _end(connection: TlsSocket, far: socket.socket) -> None:
    for each in (connection, far):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
