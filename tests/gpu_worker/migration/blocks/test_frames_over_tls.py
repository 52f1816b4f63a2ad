"""Blocks over TLS: they arrive whole, both directions at once, and only between workers."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from certificates import Certificates
from cryptography import x509
from migration_peers import PATIENCE_S, SECRET, BytesMemory, Target, name_of, wait_until

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from octavo.net.security.roles import PeerRole
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.request.errors import TransferFailed
from octavo.wire.tls import WORKER_NAME

NUM_BLOCKS, LAYERS, LAYER_BYTES = 30, 5, 70_000  # a part is longer than a record of TLS, which has 16 KiB at most


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls") / "tls")


@contextmanager
def listening(
    certificates: Certificates, memory: BytesMemory, role: str = "worker", trail: AccessTrail | None = None
) -> Iterator[Target]:
    target, files = Target(memory), certificates.files(role)
    target.listener.close()
    files.trail = trail
    target.listener = BlockListener("127.0.0.1", tls=files)
    try:
        yield target
    finally:
        target.listener.close()


def connect(certificates: Certificates, port: int, memory: BytesMemory, role: str = "worker") -> BlockSender:
    return BlockSender("127.0.0.1", port, memory, RateLimiter(), certificates.files(role), part_bytes=1 << 16)


def test_blocks_arrive_as_they_were(certificates: Certificates) -> None:
    mine = BytesMemory(NUM_BLOCKS, LAYERS, LAYER_BYTES).fill(random.Random(1))
    theirs = BytesMemory(NUM_BLOCKS, LAYERS, LAYER_BYTES)
    with listening(certificates, theirs) as target:
        target.give_ticket(1, list(range(NUM_BLOCKS)))
        with closing(connect(certificates, target.listener.port, mine)) as sender:
            sender.open_ticket(1, SECRET).result(PATIENCE_S)
            blocks = [OutgoingBlock(index, index, name_of(index)) for index in range(NUM_BLOCKS)]
            sender.send_blocks(1, blocks).result(PATIENCE_S)
            wait_until(lambda: sender.bytes_in_flight == 0)
        assert sender.num_resends == 0
    assert [theirs.content(block) for block in range(NUM_BLOCKS)] == [mine.content(b) for b in range(NUM_BLOCKS)]


def test_no_block_can_be_read_on_the_way(certificates: Certificates) -> None:
    """What a proxy between the two sees holds nothing of a block, and no ticket's number."""
    mine, theirs = BytesMemory(1, 1, 64_000), BytesMemory(1, 1, 64_000)
    mine.layers[0][:] = b"canary-of-keys-and-values-"[:25] * 2560
    with listening(certificates, theirs) as target:
        target.give_ticket(77, [0])
        with eavesdropping(target.listener.port) as (port, heard):
            with closing(connect(certificates, port, mine)) as sender:
                sender.open_ticket(77, SECRET).result(PATIENCE_S)
                sender.send_blocks(77, [OutgoingBlock(0, 0, name_of(0))]).result(PATIENCE_S)
            assert len(heard()) > 64_000
            assert b"canary" not in heard()
    assert theirs.content(0) == mine.content(0)


@pytest.mark.parametrize(("source", "target"), [("router", "worker"), ("client", "worker"), ("worker", "router")])
def test_only_workers_connect(certificates: Certificates, source: str, target: str) -> None:
    memory = BytesMemory(1, 1, 64)
    with (
        listening(certificates, memory, target) as other,
        pytest.raises(TransferFailed, match=r"no TLS with|ended the connection|does not greet"),
    ):
        connect(certificates, other.listener.port, memory, source)


@pytest.mark.parametrize(
    "kind", [x509.DNSName, x509.RFC822Name, lambda role: x509.UniformResourceIdentifier(role + "\0")]
)
def test_only_a_whole_uri_makes_a_worker(certificates: Certificates, kind: Callable[[str], x509.GeneralName]) -> None:
    """On both sides of a connection: the other names that a certificate may have give no role."""
    memory, worker = BytesMemory(1, 1, 64), certificates.files("worker")
    named = certificates.with_names(
        "named", [x509.DNSName(WORKER_NAME), kind(PeerRole.WORKER.uri)], PeerRole.WORKER.uri
    )
    for source, target in [(named, worker), (worker, named)]:
        listener = BlockListener("127.0.0.1", tls=target)
        try:
            with pytest.raises(TransferFailed, match=r"no TLS with|ended the connection|does not greet"):
                BlockSender("127.0.0.1", listener.port, memory, RateLimiter(), source)
        finally:
            listener.close()


def test_a_source_without_tls_gets_nothing(certificates: Certificates) -> None:
    with listening(certificates, BytesMemory(1, 1, 64)) as target:
        with socket.create_connection(("127.0.0.1", target.listener.port)) as plain:
            plain.sendall(b"OPEN a ticket, please" * 10)
            plain.settimeout(PATIENCE_S)
            received = b""
            while more := plain_recv(plain):
                received += more
        assert len(received) <= 7  # an alert of TLS, or nothing
        wait_until(lambda: target.listener.num_connections == 0)


def test_a_source_that_says_nothing_does_not_hold_up_the_end(certificates: Certificates) -> None:
    with listening(certificates, BytesMemory(1, 1, 64)) as target:
        silent = socket.create_connection(("127.0.0.1", target.listener.port))
        wait_until(lambda: target.listener.num_connections == 1)
    assert target.listener.num_connections == 0
    silent.close()


def test_a_worker_of_another_authority_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    memory, other = BytesMemory(1, 1, 64), Certificates(tmp_path / "tls")
    with listening(certificates, memory) as target, pytest.raises(TransferFailed, match="no TLS with"):
        connect(other, target.listener.port, memory)


@pytest.mark.parametrize("reason", ["role", "handshake"])
def test_who_is_refused_is_counted(certificates: Certificates, tmp_path: Path, reason: str) -> None:
    trail, memory = AccessTrail(ListenerKind.BLOCKS), BytesMemory(1, 1, 64)
    caller = certificates if reason == "role" else Certificates(tmp_path / "tls")

    def counts() -> dict[tuple[str, ...], float]:
        return {value.labels: value.value for value in trail.values() if value.value}

    with listening(certificates, memory, trail=trail) as target:
        with pytest.raises(TransferFailed):
            connect(caller, target.listener.port, memory, "router")
        wait_until(lambda: bool(counts()))
    assert counts() == {("blocks", reason): 1}


def plain_recv(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1000)
    except OSError:
        return b""


@contextmanager
def eavesdropping(port: int) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """A proxy to the port, and what has passed it so far."""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := plain_recv(source):
            heard.append(data)
            target.sendall(data)
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    threads = []

    def serve() -> None:
        near, _ = server.accept()
        far = socket.create_connection(("127.0.0.1", port))
        both = [threading.Thread(target=copy, args=pair) for pair in ((near, far), (far, near))]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        near.close()
        far.close()

    threads.append(threading.Thread(target=serve))
    threads[0].start()
    try:
        yield server.getsockname()[1], lambda: b"".join(heard)
    finally:
        threads[0].join()
        server.close()
