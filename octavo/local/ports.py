"""Finds free ports of this machine. Programs of octavo that look for some at the same moment find different ones."""

import os
import random
import socket
import sys
from collections.abc import Collection, Iterator
from functools import cache
from itertools import groupby, islice
from pathlib import Path

from octavo.process.command_error import CommandError

# Below the range that connecting sockets are given: such a port could be taken while its server is being restarted,
# and a client that keeps connecting to it could connect to itself.
RANGE = range(20_000, 32_000)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # where a machine gives them another range
BLOCK = 250  # ports that one process claims at a time


class PortInUseError(CommandError):
    """Another program listens on the port. The message says what to do."""


class PortPool:
    """The ports that this process may pick: blocks that no other process picks from while this one lives.

    Where others have claimed all blocks, a process picks from theirs as well. A claim is a socket in Linux's abstract
    namespace, of which there is one for each set of ports: it ends with the process, and needs no file.
    """

    def __init__(self) -> None:
        by_block = groupby(usable_ports(), lambda port: port // BLOCK)
        self._blocks = [(number, list(ports)) for number, ports in by_block]
        random.shuffle(self._blocks)
        self._ports: list[int] = []  # of the blocks claimed so far
        self._claims: list[int] = []  # file descriptors
        self._turn = 0

    def in_turn(self) -> Iterator[int]:
        """All ports, the ports of blocks that are claimed already first.

        Among these the port that was given out longest ago comes first.
        """
        for _ in range(len(self._ports)):
            self._turn = (self._turn + 1) % len(self._ports)
            yield self._ports[self._turn]
        while self._blocks:
            number, block = self._blocks.pop()
            if self._claim(number):
                self._turn = len(self._ports) - 1
                self._ports += block
                for port in block:
                    self._turn += 1
                    yield port
        rest = set(usable_ports()).difference(self._ports)
        yield from random.sample(sorted(rest), len(rest))

    def close(self) -> None:
        """Ends the claims. Without it, they end with the process."""
        while self._claims:
            os.close(self._claims.pop())

    def _claim(self, number: int) -> bool:
        if sys.platform != "linux":
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(f"\0octavo-ports-{number * BLOCK}")
            except OSError:
                return False
            self._claims.append(claim.detach())
        return True


def usable_ports() -> list[int]:
    """RANGE without the ports that connecting sockets are given; all of RANGE if none is left."""
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return list(RANGE)
    return [port for port in RANGE if not first <= port <= last] or list(RANGE)


@cache
def _pool() -> PortPool:
    return PortPool()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now; port 0 means any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def require_free(host: str, port: int, option: str) -> None:
    """Raises CommandError if no server could listen on the port."""
    if not is_free(host, 0):
        raise CommandError(f"--host {host} is no address of this machine: give one, or 0.0.0.0 for all of them")
    if not is_free(host, port):
        raise PortInUseError(
            f"port {port} on {host} is in use: end what listens there, or choose another with {option}"
        )


def pick(count: int, host: str = "127.0.0.1", besides: Collection[int] = ()) -> list[int]:
    """`count` different free ports, none of them in `besides`. Raises PortInUseError if there are fewer.

    While this process lives, no other program of octavo on this machine is given them.
    """
    found = (port for port in _pool().in_turn() if port not in besides and is_free(host, port))
    ports = list(islice(found, count))
    if len(ports) < count:
        raise PortInUseError(f"{count} free ports between {RANGE.start} and {RANGE.stop} are needed: end something")
    return ports
