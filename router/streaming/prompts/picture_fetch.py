"""Gets pictures from hosts that the operator has listed, and from no other machine, whatever a URL or a name says."""

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import SplitResult, urlsplit

from octavo.request.errors import InvalidArgument, Unreachable

PORTS = {"http": 80, "https": 443}
STEP_S, TOTAL_S = 5.0, 15.0  # until something comes, and until all has come
MAX_URL = 4096  # characters
PIECE = 1 << 16
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # addresses that a gateway turns into those in their last four bytes


def fetch_picture(url: str, field: str, hosts: tuple[str, ...], most: int) -> bytes:
    """The bytes behind a URL, at most `most`. It takes its time.

    Raises InvalidArgument for what no retry makes better, and Unreachable otherwise.
    """
    parts = checked_url(url, field, hosts)
    host, port = str(parts.hostname), parts.port or PORTS[parts.scheme]
    ends_at = time.monotonic() + TOTAL_S
    try:
        connection = _connected(parts.scheme, host, port, field)
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "octavo"})
            return _body(connection.getresponse(), host, field, most, ends_at)
        finally:
            connection.close()
    except InvalidArgument:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"{host} does not give a picture: {str(error)[:200]}: retry") from error


def checked_url(url: str, field: str, hosts: tuple[str, ...]) -> SplitResult:
    """The parts of a URL of a listed host. Raises InvalidArgument for any other."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        parts, scheme, host, port = SplitResult("", "", "", "", ""), "", None, None
    if len(url) > MAX_URL or scheme not in PORTS or not host or not url.isascii() or not url.isprintable():
        raise InvalidArgument(field, "must be data:image/png;base64,… or a URL of https of printable ASCII characters")
    if parts.username is not None or parts.password is not None or " " in url:
        raise InvalidArgument(field, "has a name, a password or a space, which is not sent on: leave it out")
    shown = f"[{host}]" if ":" in host else host
    origin = f"{scheme}://{shown}" + ("" if port in (None, PORTS[scheme]) else f":{port}")
    if origin not in hosts:
        remedy = "send a data URL, or have the operator add the host to picture_hosts"
        raise InvalidArgument(field, f"nothing is fetched from {origin[:100]}: {remedy}")
    return parts


def is_public(address: str) -> bool:
    """Whether an address is one of the Internet, and not of this machine or of a network behind it."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
    return ip.is_global and not ip.is_multicast


def _connected(scheme: str, host: str, port: int, field: str) -> http.client.HTTPConnection:
    """A connection to an address that was looked at: the name is not asked again."""
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(is_public, found)):
        raise InvalidArgument(
            field, f"{host} is no public address, and nothing is fetched from others: send a data URL"
        )
    plain = socket.create_connection((found[0], port), STEP_S)
    connection = http.client.HTTPConnection(host, port)
    try:
        secured = ssl.create_default_context().wrap_socket(plain, server_hostname=host) if scheme == "https" else plain
    except BaseException:
        plain.close()
        raise
    connection.sock = secured
    return connection


def _body(answer: http.client.HTTPResponse, host: str, field: str, most: int, ends_at: float) -> bytes:
    if 300 <= answer.status < 400:
        raise InvalidArgument(field, "leads elsewhere, which is not followed: give the address of the picture itself")
    if answer.status != http.client.OK:
        text = f"its host answers {answer.status}"
        if answer.status < 500:
            raise InvalidArgument(field, f"{text}: give a picture that anybody may read, or a data URL")
        raise Unreachable(f"a picture of {host}: {text}: retry")
    received = bytearray()
    while piece := answer.read1(PIECE):
        received += piece
        if len(received) > most:
            raise InvalidArgument(field, f"has more than {most} bytes: reduce it, or have picture_bytes raised")
        if time.monotonic() > ends_at:
            raise Unreachable(f"a picture of {host} takes more than {TOTAL_S:g} s: retry, or send its bytes")
    return bytes(received)
