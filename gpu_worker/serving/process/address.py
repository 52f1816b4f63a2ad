"""The address at which routers are told to call this worker."""

import ipaddress
import socket

from octavo.process.listen_address import EVERY_INTERFACE
from octavo.wire.endpoint import parse_advertised, parse_listener


class NoAddress(RuntimeError):
    """No address to advertise can be found. The message says which setting helps."""


def advertised_address(listen: str, advertise: str) -> tuple[str, int | None]:
    """The host and the port in `advertise`, else the host in `listen`, else an address of this machine.

    Without a port, the one that the worker listens on is to be called. Raises NoAddress.
    """
    if advertise:
        return parse_advertised(advertise)
    host = parse_listener(listen).host
    return own_address() if host in EVERY_INTERFACE else host, None


def own_address() -> str:
    """The address that this machine's name stands for: in a cluster, the address of the pod. Raises NoAddress."""
    name = socket.gethostname()
    try:
        found = {info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    addresses = [ipaddress.ip_address(str(text).partition("%")[0]) for text in found]
    others = [each for each in addresses if not (each.is_loopback or each.is_link_local)]
    if not others:
        raise NoAddress(f"the name of this host, {name}, has no address that others could call: give --advertise HOST")
    best = min(others, key=lambda each: (each.version, str(each)))
    return f"[{best}]" if best.version == 6 else str(best)
