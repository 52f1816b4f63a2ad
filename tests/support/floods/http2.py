"""Frames of HTTP/2, written by hand, so that a test may send what no library would."""

import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = struct.pack(">I", 8)
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def hello(settings: Sequence[tuple[int, int]] = ()) -> bytes:
    """How a client begins, with its settings and those of the server acknowledged."""
    own = b"".join(struct.pack(">HI", name, value) for name, value in settings)
    return PREFACE + frame(SETTINGS, own) + frame(SETTINGS, flags=ACK)


def literal(name: bytes, value: bytes, *, indexed: bool = False) -> bytes:
    """A header, in full; with `indexed`, it also goes to the table of the connection."""
    return bytes((0x40 if indexed else 0,)) + _text(name) + _text(value)


def _text(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes((len(value),)) + value
    left, number = len(value) - 127, bytearray([127])
    while left >= 128:
        number.append(left % 128 + 128)
        left //= 128
    number.append(left)
    return bytes(number) + value


def call_headers(method: str, *more: tuple[bytes, bytes]) -> bytes:
    """The header block of a call over gRPC."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]
    return b"".join(literal(name, value) for name, value in pairs)


def message(body: bytes, *, compressed: bool = False, length: int | None = None) -> bytes:
    """A message of gRPC, which may lie about its length."""
    return bytes((int(compressed),)) + struct.pack(">I", len(body) if length is None else length) + body
