"""Addresses on which programs listen, and whether other machines can reach them."""

import ipaddress
from collections.abc import Iterable

from octavo.wire.endpoint import parse_listener

EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # hosts that stand for all interfaces, and their loopback


class ListenError(Exception):
    """The address is taken, or is not an address of this machine."""


def with_host(address: str, host: str) -> str:
    """The address HOST:PORT with another host. An empty host leaves it as it is; version 6 may lack its brackets."""
    return str(parse_listener(address).with_host(host)) if host else address


def reachable_address(address: str) -> str:
    """The address at which this machine can call a program that listens on HOST:PORT: every interface has loopback."""
    endpoint = parse_listener(address)
    return str(endpoint.with_host(EVERY_INTERFACE.get(endpoint.host, endpoint.host)))


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine can call HOST:PORT. A name other than localhost counts as reachable."""
    host = parse_listener(address).host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposed_addresses(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses HOST:PORT that other machines can reach. Empty ones are nowhere."""
    return [address for address in addresses if address and not is_loopback(address)]


def why_not_listening(address: str, flag: str) -> str:
    """The error of a server that could not bind the address, of which gRPC says no more."""
    return f"cannot listen on {address}: the port is taken, or the host is none of this machine; choose with {flag}"
