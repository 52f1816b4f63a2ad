"""Blocks on their way between two workers beside raw TCP on loopback, interleaved; both ends in one process each.

python tests/bench/block_channel.py [--blocks 1024] [--rounds 5] [--layers 30] [--layer-bytes 24576]

Every way moves the same bytes out of blocks of an arena into blocks of another one, layer by layer, in calls of up to
1 MiB: raw TCP without frames, sums or answers, and the connection for blocks. CPU seconds are those of both processes.
"""

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from _service import describe_machine

from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.blocks.block_sender import BlockSender
from gpu_worker.migration.blocks.frame_socket import BUFFER_BYTES, drop_front
from gpu_worker.migration.blocks.incoming_ticket import ExpectedBlock, IncomingTicket
from gpu_worker.migration.blocks.link_share import RateLimiter
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock

SECRET = bytes(32)
CALL_BYTES = 1 << 20
WAYS = ("raw TCP", "blocks")


class Rate(NamedTuple):
    """One way in one round."""

    gb_per_s: float
    cpu_s_per_gb: float


class Arena:
    """Blocks in layers, as the arena of a worker on a CPU has them."""

    blocks_per_turn = 1

    def __init__(self, args: argparse.Namespace, fill: bool) -> None:
        size = args.layers * args.blocks * args.layer_bytes
        self.num_blocks, self.layers, self.layer_bytes = args.blocks, args.layers, args.layer_bytes
        self.bytes_per_block = args.layers * args.layer_bytes
        made = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8) if fill else np.full(size, 1, np.uint8)
        self.memory = memoryview(made)

    def open_block(self, block: int) -> list[memoryview]:
        starts = range(block * self.layer_bytes, len(self.memory), self.num_blocks * self.layer_bytes)
        return [self.memory[start : start + self.layer_bytes] for start in starts]

    def read_blocks(self, blocks: Sequence[int]) -> AbstractContextManager[Iterator[list[memoryview]]]:
        return nullcontext(map(self.open_block, blocks))

    def keep_block(self, block: int) -> None: ...

    def close_block(self, block: int) -> None: ...


def calls(arena: Arena, order: list[int]) -> list[list[memoryview]]:
    """The runs of all blocks, up to CALL_BYTES to a call."""
    per_call = max(1, CALL_BYTES // arena.bytes_per_block)
    groups = [order[i : i + per_call] for i in range(0, len(order), per_call)]
    return [[run for block in group for run in arena.open_block(block)] for group in groups]


def receive(args: argparse.Namespace, pipe: Connection) -> None:
    """The target's process: receives by each way that the pipe names, and tells the CPU seconds that it took."""
    arena = Arena(args, fill=False)
    order = list(range(args.blocks))
    random.Random(2).shuffle(order)
    while (way := pipe.recv()) is not None:
        if way == "blocks":
            listener = BlockListener("127.0.0.1")
            ticket = IncomingTicket(1, SECRET, arena, time.monotonic() + 3600, lambda _: None, lambda _: None)
            ticket.expect_blocks([ExpectedBlock(block, b"") for block in order])
            listener.tickets.add_ticket(ticket)
            pipe.send(listener.port)
            began = time.process_time()
            pipe.recv()
            pipe.send(time.process_time() - began)
            listener.close()
            continue
        server = socket.create_server(("127.0.0.1", 0))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        pipe.send(server.getsockname()[1])
        sock = server.accept()[0]
        began = time.process_time()
        for runs in calls(arena, order):
            while runs:
                drop_front(runs, sock.recvmsg_into(runs, 0, socket.MSG_WAITALL)[0])
        sock.sendall(b"!")
        pipe.recv()
        pipe.send(time.process_time() - began)
        sock.close()
        server.close()


def send_raw(port: int, arena: Arena, order: list[int]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        for runs in calls(arena, order):
            while runs:
                drop_front(runs, sock.sendmsg(runs))
        sock.recv(1)


def send_blocks(port: int, arena: Arena, order: list[int]) -> None:
    sender = BlockSender("127.0.0.1", port, arena, RateLimiter())
    sender.open_ticket(1, SECRET).result(30)
    sender.send_blocks(1, [OutgoingBlock(i, block, b"") for i, block in enumerate(order)]).result(600)
    sender.close()


def measure(way: str, pipe: Connection, arena: Arena, order: list[int]) -> Rate:
    pipe.send(way)
    port = pipe.recv()
    cpu, began = time.process_time(), time.perf_counter()
    if way == "blocks":
        send_blocks(port, arena, order)
    else:
        send_raw(port, arena, order)
    took = time.perf_counter() - began
    mine = time.process_time() - cpu
    pipe.send("done")
    gigabytes = arena.bytes_per_block * len(order) / 1e9
    return Rate(gigabytes / took, (mine + pipe.recv()) / gigabytes)


def main(args: argparse.Namespace) -> None:
    print(describe_machine())
    print(f"load {os.getloadavg()[0]:.1f}; {args.blocks} blocks of {args.layers} × {args.layer_bytes} bytes")
    arena = Arena(args, fill=True)
    order = list(range(args.blocks))
    random.Random(1).shuffle(order)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(args, theirs))
    process.start()
    rounds: list[dict[str, Rate]] = []
    for number in range(args.rounds + 1):
        taken = {way: measure(way, mine, arena, order) for way in WAYS[number % 2 :] + WAYS[: number % 2]}
        if number:  # the first one touches memory for the first time
            rounds.append(taken)
    mine.send(None)
    process.join()
    for way in WAYS:
        rate = statistics.median(taken[way].gb_per_s for taken in rounds)
        cpu = statistics.median(taken[way].cpu_s_per_gb for taken in rounds)
        of_raw = statistics.median(taken[way].gb_per_s / taken["raw TCP"].gb_per_s for taken in rounds)
        more = statistics.median(taken[way].cpu_s_per_gb / taken["raw TCP"].cpu_s_per_gb for taken in rounds)
        print(f"{way:8} {rate:6.2f} GB/s {cpu:6.2f} CPU-s/GB   {100 * of_raw:4.0f} % of raw TCP, {more:4.2f} × its CPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--layer-bytes", type=int, default=24576)
    main(parser.parse_args())
