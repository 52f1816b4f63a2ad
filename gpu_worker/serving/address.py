"""The address at which routers are told to call this worker."""

import ipaddress
import socket

EVERYWHERE = ("", "0.0.0.0", "[::]", "::", "*")  # hosts that mean every address of this machine


class NoAddress(RuntimeError):
    """No address to advertise can be found, or `--advertise` is malformed. The message says which setting helps."""


def advertised_host(listen: str, advertise: str) -> str:
    """The host in `advertise`, else the host in `listen`, else an address of this machine. Raises NoAddress."""
    if advertise:
        host, colon, port = advertise.rpartition(":")
        host = host if colon and port.isdigit() else advertise
        if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise NoAddress(f"--advertise {advertise}: give HOST or HOST:PORT, version 6 in brackets: [fd00::1]")
        return host
    host = listen.rpartition(":")[0]
    return own_address() if host in EVERYWHERE else host


def advertised_port(advertise: str) -> int | None:
    """The port in `advertise`; None if it has none, and the port that the worker listens on is to be called."""
    port = advertise.rpartition(":")[2] if ":" in advertise else ""
    return int(port) if port.isdigit() else None


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
