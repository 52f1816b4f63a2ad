"""Both ends of a connection for blocks: memory of plain bytes, a target with what it was told, and a source that sends
whatever a test wants."""

import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import wait_until

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.frame_socket import FrameSocket
from gpu_worker.migration.blocks.frames import HEADER, BlockFrame, FrameKind, proof
from gpu_worker.migration.blocks.incoming_ticket import ExpectedBlock, IncomingTicket
from octavo.request.errors import TransferFailed

SECRET = bytes(range(32))
PATIENCE_S = 60


class BytesMemory:
    """Blocks in one bytearray per layer, as an arena has them on a CPU. Counts who has a block open."""

    def __init__(self, num_blocks: int, num_layers: int, layer_bytes: int) -> None:
        self.layers = [memoryview(bytearray(num_blocks * layer_bytes)) for _ in range(num_layers)]
        self.layer_bytes = layer_bytes
        self.bytes_per_block = num_layers * layer_bytes
        self.opened: list[int] = []
        self.kept: list[int] = []
        self.fail_keeping = False
        self.blocks_per_turn = 1
        self.delay: threading.Event | None = None  # keep_block waits for it

    def fill(self, rng: Any) -> "BytesMemory":
        for layer in self.layers:
            layer[:] = rng.randbytes(len(layer))
        return self

    @contextmanager
    def read_blocks(self, blocks: Sequence[int]) -> Iterator[Iterator[list[memoryview]]]:
        opened: list[int] = []

        def contents() -> Iterator[list[memoryview]]:
            for block in blocks:
                runs = self.open_block(block)
                opened.append(block)
                yield runs

        try:
            yield contents()
        finally:
            for block in opened:
                self.close_block(block)

    def open_block(self, block: int) -> list[memoryview]:
        self.opened.append(block)
        return [layer[block * self.layer_bytes : (block + 1) * self.layer_bytes] for layer in self.layers]

    def keep_block(self, block: int) -> None:
        if self.delay:
            assert self.delay.wait(PATIENCE_S)
        if self.fail_keeping:
            raise OSError("the device is gone")
        self.kept.append(block)

    def close_block(self, block: int) -> None:
        self.opened.remove(block)

    def content(self, block: int) -> bytes:
        start = block * self.layer_bytes
        return b"".join(layer[start : start + self.layer_bytes] for layer in self.layers)


class Target:
    """A listener, its memory, and what the tickets told their owner."""

    def __init__(self, memory: BytesMemory, stall_s: float = 3.0) -> None:
        self.memory = memory
        self.listener = BlockListener("127.0.0.1", stall_s=stall_s)
        self.blocks: dict[int, list[int]] = {}
        self.ends: dict[int, list[TransferFailed | None]] = {}
        self.open_at_end: dict[int, list[int]] = {}  # blocks that had a writer when a ticket ended: must be none

    def give_ticket(
        self, number: int, blocks: list[int], seconds: float = 600, secret: bytes = SECRET
    ) -> IncomingTicket:
        self.blocks[number], self.ends[number] = [], []

        def ended(error: TransferFailed | None) -> None:
            self.open_at_end[number] = [block for block in self.memory.opened if block in blocks]
            self.ends[number].append(error)

        expires = time.monotonic() + seconds
        ticket = IncomingTicket(number, secret, self.memory, expires, self.blocks[number].append, ended)
        ticket.expect_blocks([ExpectedBlock(block, name_of(block)) for block in blocks])
        self.listener.tickets.add_ticket(ticket)
        return ticket

    def cause(self, number: int) -> str | None:
        """Why a ticket has ended; waits for it. Its owner was told once, and nothing writes to its blocks."""
        wait_until(lambda: self.ends[number])
        [error] = self.ends[number]
        assert self.open_at_end[number] == []
        return error.cause if error else None


def name_of(block: int) -> bytes:
    return b"block" + bytes([block]) * 11


@contextmanager
def target_of(memory: BytesMemory, stall_s: float = 3.0) -> Iterator[Target]:
    target = Target(memory, stall_s)
    try:
        yield target
    finally:
        target.listener.close()
        assert memory.opened == []
        assert all(len(ends) == 1 for ends in target.ends.values()), target.ends


class RawSource:
    """A source that sends frames as it is told, right or wrong."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.nonce = secrets.token_bytes(16)
        hello, self.peer_nonce = self.receive()
        assert hello.kind is FrameKind.HELLO

    def send(self, frame: BlockFrame, body: bytes = b"") -> None:
        self.socket.sendall(frame.encode() + body)

    def receive(self) -> tuple[BlockFrame, bytes]:
        frame = BlockFrame.decode(self._exactly(HEADER.size))
        return frame, self._exactly(frame.length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def receive_kind(self, *kinds: FrameKind) -> tuple[BlockFrame, bytes]:
        """The next frame of one of these kinds."""
        while True:
            frame, body = self.receive()
            if frame.kind in kinds:
                return frame, body

    def open(self, number: int, secret: bytes = SECRET) -> tuple[BlockFrame, bytes]:
        body = self.nonce + proof(secret, number, b"source", self.peer_nonce + self.nonce)
        self.send(BlockFrame(FrameKind.OPEN, length=len(body), ticket=number), body)
        return self.receive_kind(FrameKind.OPENED, FrameKind.FAILED)

    def is_cut_off(self) -> bool:
        """Whether the target ends the connection; reads what is left, and ends it here, too."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionError):
            self.close()
            return True

    def close(self) -> None:
        self.socket.close()


class Corrupter:
    """Changes one bit of the parts that are chosen on their way, after their checksum was taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choose: Callable[[BlockFrame], bool], seed: int = 0) -> None:
        self.num_changed = 0
        rng, send = random.Random(seed), FrameSocket.send_frame

        def send_frame(frames: FrameSocket, frame: BlockFrame, runs: list[memoryview] | None = None) -> None:
            if frame.kind is FrameKind.PART and runs and choose(frame):
                self.num_changed += 1
                data = bytearray(b"".join(runs))
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                runs = [memoryview(data)]
            send(frames, frame, runs)

        monkeypatch.setattr(FrameSocket, "send_frame", send_frame)
