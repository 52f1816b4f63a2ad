"""Origins of web pages, as the setting `http_origins` of a router writes them: https://chat.example.com."""

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

ANY = "*"
PORTS = {"http": 80, "https": 443}  # which browsers leave out
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+", re.ASCII)


def parse_origins(entries: Iterable[str]) -> tuple[str, ...]:
    """The origins as browsers write them.

    Raises a ValueError that names the wrong entry and says what would be right.
    """
    return tuple(ANY if each.strip() == ANY else _parse_one(each.strip()) for each in entries)


def _parse_one(text: str) -> str:
    wrong = f"{text!r} must be SCHEME://HOST or SCHEME://HOST:PORT, such as https://chat.example.com; {ANY}: any"
    try:
        parts = urlsplit(text)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        raise ValueError(wrong) from None
    more = (parts.path.removeprefix("/"), parts.query, parts.fragment)
    if not scheme or not host or not _HOST.fullmatch(host) or any(more) or "@" in text:
        raise ValueError(wrong)
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}" + ("" if port in (None, PORTS.get(scheme)) else f":{port}")
