"""Blocks over TLS: they arrive whole, both directions at once, and only between workers."""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from certificates import Certificates
from cryptography import x509
from migration_peers import PATIENCE_S, SECRET, BytesMemory, Target, name_of
from waiting import wait_until

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from octavo.net.security.roles import PeerRole
from octavo.net.security.trail import AccessTrail, ListenerKind
from octavo.request.errors import TransferFailed
from octavo.wire.tls import WORKER_NAME

NUM_BLOCKS, LAYERS, LAYER_BYTES = 30, 5, 70_000  # a part is longer than a record of TLS, which has 16 KiB at most
REFUSED = r"no TLS with|ended the connection|does not greet"


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


def test_blocks_arrive_as_they_were_and_nobody_can_read_them_on_the_way(certificates: Certificates) -> None:
    """What a proxy between the two sees holds nothing of a block."""
    mine = BytesMemory(NUM_BLOCKS, LAYERS, LAYER_BYTES).fill(random.Random(1))
    theirs = BytesMemory(NUM_BLOCKS, LAYERS, LAYER_BYTES)
    mine.layers[0][:] = b"canary-of-keys-and-values-"[:25] * (len(mine.layers[0]) // 25)
    with listening(certificates, theirs) as target:
        target.give_ticket(1, list(range(NUM_BLOCKS)))
        with eavesdropping(target.listener.port) as (port, heard):
            with closing(connect(certificates, port, mine)) as sender:
                sender.open_ticket(1, SECRET).result(PATIENCE_S)
                blocks = [OutgoingBlock(index, index, name_of(index)) for index in range(NUM_BLOCKS)]
                sender.send_blocks(1, blocks).result(PATIENCE_S)
                wait_until(lambda: sender.bytes_in_flight == 0)
            assert sender.num_resends == 0
            assert len(heard()) > NUM_BLOCKS * mine.bytes_per_block and b"canary" not in heard()
    assert [theirs.content(block) for block in range(NUM_BLOCKS)] == [mine.content(b) for b in range(NUM_BLOCKS)]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("router", "worker", "role"),
        ("client", "worker", "role"),
        ("worker", "router", ""),
        ("other", "worker", "handshake"),
    ],
)
def test_only_workers_of_the_same_authority_connect(
    certificates: Certificates, tmp_path: Path, source: str, target: str, reason: str
) -> None:
    """Who is refused is counted."""
    trail, memory = AccessTrail(ListenerKind.BLOCKS), BytesMemory(1, 1, 64)
    caller = Certificates(tmp_path / "tls") if source == "other" else certificates

    def counts() -> dict[tuple[str, ...], float]:
        return {value.labels: value.value for value in trail.values() if value.value}

    with listening(certificates, memory, target, trail) as other:
        with pytest.raises(TransferFailed, match=REFUSED):
            connect(caller, other.listener.port, memory, "worker" if source == "other" else source)
        wait_until(lambda: counts() or not reason)
    assert not reason or counts() == {("blocks", reason): 1}


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
        with closing(BlockListener("127.0.0.1", tls=target)) as listener:
            with pytest.raises(TransferFailed, match=REFUSED):
                BlockSender("127.0.0.1", listener.port, memory, RateLimiter(), source)


def test_a_source_without_tls_gets_nothing(certificates: Certificates) -> None:
    with listening(certificates, BytesMemory(1, 1, 64)) as target:
        with socket.create_connection(("127.0.0.1", target.listener.port)) as plain:
            plain.sendall(b"OPEN a ticket, please" * 10)
            plain.settimeout(PATIENCE_S)
            received = b"".join(iter(lambda: plain_recv(plain), b""))
        assert len(received) <= 7  # an alert of TLS, or nothing
        wait_until(lambda: target.listener.num_connections == 0)


def test_a_source_that_says_nothing_does_not_hold_up_the_end(certificates: Certificates) -> None:
    with listening(certificates, BytesMemory(1, 1, 64)) as target:
        silent = socket.create_connection(("127.0.0.1", target.listener.port))
        wait_until(lambda: target.listener.num_connections == 1)
    assert target.listener.num_connections == 0
    silent.close()


def plain_recv(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


@contextmanager
def eavesdropping(port: int) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """A proxy to the port, and what has passed it so far."""
    heard: list[bytes] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := plain_recv(source):
            heard.append(data)
            target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with server.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], lambda: b"".join(heard)
        thread.join()
