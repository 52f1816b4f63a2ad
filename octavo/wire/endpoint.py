"""Endpoints: the host and port of a process in one text. Every other module reads and checks them by this one.

gRPC itself takes the port 99999 for 34463 and a missing port for 443, so no text reaches it unchecked. What cannot be
used raises a ValueError that says what would be right; callers add the text and the name of the field.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from typing import TypeAlias

MAX_PORT = 65535
# The routers of one cell or of several: "a:1,b:1;c:1", ["a:1", "b:1"] or [["a:1", "b:1"], ["c:1"]]
Endpoints: TypeAlias = str | Sequence[str] | Sequence[Sequence[str]]
_NAME = re.compile(r"[\w.-]+")  # a DNS name or an address of version 4
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SOCKETS = ("unix:", "unix-abstract:")
_ADDRESSES = ("ipv4:", "ipv6:")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port. An address of version 6 has its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def with_host(self, host: str) -> "Endpoint":
        """The same port on another host; version 6 may lack its brackets. Raises ValueError."""
        return replace(self, host=parse_host(host))


def parse_endpoint(text: str) -> Endpoint:
    """What HOST:PORT means as an address that others call."""
    return _parse(text, lowest_port=1)


def parse_listener(text: str) -> Endpoint:
    """What HOST:PORT means as an address to listen on. Port 0 stands for any free one."""
    return _parse(text, lowest_port=0)


def parse_host(text: str) -> str:
    """A host without a port. An address of version 6 gets its brackets if it lacks them."""
    if ":" not in text and "[" not in text:
        return _checked_name(text)
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return f"[{_checked_version_6(inner)}]"


def parse_advertised(text: str) -> tuple[str, int | None]:
    """What HOST or HOST:PORT means as the address of a listener; None: the port is that of the listener."""
    if text.endswith("]") or ":" not in text:
        return parse_host(text), None
    endpoint = parse_endpoint(text)
    return endpoint.host, endpoint.port


def check_target(text: str) -> None:
    """Raises ValueError if a client cannot connect to `text`.

    Besides HOST:PORT, names of gRPC are allowed: dns:///HOST:PORT, ipv4:ADDRESS:PORT, ipv6:[ADDRESS]:PORT, unix:PATH.
    """
    for prefix in _SOCKETS:
        if text.startswith(prefix):
            if len(text) == len(prefix):
                raise ValueError(f"has no path after {prefix}")
            return
    for prefix in _ADDRESSES:
        if text.startswith(prefix):
            for part in text.removeprefix(prefix).split(","):
                parse_endpoint(part)
            return
    if text.startswith("dns:"):
        name = text.removeprefix("dns:")
        parse_endpoint(name[2:].partition("/")[2] if name.startswith("//") else name)
    else:
        parse_endpoint(text)


def parse_targets(given: str | Sequence[str]) -> tuple[str, ...]:
    """The targets in a text with commas between them, or in a list. The ValueError names the one that is wrong."""
    parts = given.split(",") if isinstance(given, str) else given
    targets = tuple(part.strip() for part in parts if part.strip())
    if not targets:
        raise ValueError("at least one HOST:PORT is needed")
    for target in targets:
        try:
            check_target(target)
        except ValueError as error:
            raise ValueError(f"{target}: {error}") from None
    return targets


def parse_cells(given: Endpoints) -> tuple[tuple[str, ...], ...]:
    """The targets of each cell: in a text with semicolons between cells, or in a list of lists. A list is one cell.

    The ValueError names the cell, if there are several, and the target that is wrong.
    """
    cells: Sequence[str | Sequence[str]]
    if isinstance(given, str):
        cells = given.split(";")
    elif all(isinstance(each, str) for each in given):
        cells = [[str(each) for each in given]]
    else:
        cells = given
    parsed = []
    for number, cell in enumerate(cells):
        try:
            parsed.append(parse_targets(cell))
        except ValueError as error:
            where = f"cell {number} of {len(cells)}: " if len(cells) > 1 else ""
            raise ValueError(f"{where}{error}") from None
    return tuple(parsed)


def _parse(text: str, *, lowest_port: int) -> Endpoint:
    if scheme := _SCHEME.match(text):
        raise ValueError(f"write HOST:PORT, without {scheme[0]}")
    if text.startswith("["):
        inner, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("must be [ADDRESS]:PORT")
        host, port = f"[{_checked_version_6(inner)}]", rest[1:]
    else:
        host, _, port = text.partition(":")
        if ":" in port:
            raise ValueError("an address of version 6 goes in brackets: [fd00::1]:50051")
        _checked_name(host)
    if not port:
        example = f"127.0.0.1:{host}" if host.isdigit() else f"{host}:50051"
        raise ValueError(f"has no port; write HOST:PORT, such as {example}")
    if not (port.isascii() and port.isdigit() and lowest_port <= int(port[:9]) <= MAX_PORT):
        raise ValueError(f"port must be {lowest_port} to {MAX_PORT}")
    return Endpoint(host, int(port))


def _checked_name(host: str) -> str:
    if not host:
        raise ValueError("has no host; 0.0.0.0 stands for every address of this machine")
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} is no host")
    return host


def _checked_version_6(text: str) -> str:
    try:
        IPv6Address(text.partition("%")[0])
    except ValueError:
        raise ValueError(f"{text!r} is no address of version 6") from None
    return text
