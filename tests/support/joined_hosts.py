"""Hosts of a group of which each is a thread, with one rank, joined by pairs of sockets."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

TOKENS, PLAN_BYTES = 8, 4096


@dataclass(slots=True)
class Host:
    """The only rank of a host."""

    team: Any
    hosts: Any
    order: Any


@contextmanager
def joined_hosts(
    extension: ModuleType, layers: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]
) -> Iterator[list[Host]]:
    """As many as have layers."""
    count, found = len(layers), []
    streams: list[socket.socket] = []
    fds = [[-1] * count for _ in layers]
    for one in range(count):
        for other in range(one):
            ends = socket.socketpair()
            streams.extend(ends)
            fds[one][other], fds[other][one] = (each.fileno() for each in ends)
    for number in range(count):
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        team = extension.Team(memory[-memory.data_ptr() % 64 :], 0, 1, 5.0)
        hosts = extension.GroupHosts(team, fds[number], number, heads, layers)
        found.append(Host(team, hosts, extension.TeamOrder(team, TOKENS, PLAN_BYTES)))
    try:
        yield found
    finally:
        for each in streams:
            each.close()


def at_once(*calls: Callable[[], bool]) -> None:
    with ThreadPoolExecutor(len(calls)) as threads:
        assert all(threads.map(lambda call: call(), calls, timeout=30))
