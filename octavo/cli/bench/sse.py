"""Server-sent events: the data of each event, of bytes that arrive in any pieces."""

from collections.abc import Iterator

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLarge(Exception):
    """An event has no end within MAX_EVENT_BYTES."""


class ServerSentEvents:
    """Takes bytes in and gives events out. Lines may end with LF or CRLF."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each event that ends in this piece. Comments and other fields are left out."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
