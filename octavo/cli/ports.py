"""Finds free ports of this machine."""

import random
import socket
from collections.abc import Collection

from octavo.cli.command_error import CommandError

# Below the range that connecting sockets are given: such a port could be taken while its server is being restarted,
# and a client that keeps connecting to it could connect to itself.
RANGE = range(20_000, 32_000)


class PortInUseError(CommandError):
    """Another program listens on the port. The message says what to do."""


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
    """`count` different free ports, none of them in `besides`. Raises PortInUseError if there are fewer."""
    ports: list[int] = []
    for port in random.sample(RANGE, len(RANGE)):
        if len(ports) == count:
            break
        if port not in besides and is_free(host, port):
            ports.append(port)
    if len(ports) < count:
        raise PortInUseError(f"{count} free ports between {RANGE.start} and {RANGE.stop} are needed: end something")
    return ports
