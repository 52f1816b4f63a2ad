"""Options of gRPC that both ends of a connection have: sizes of messages and headers, and pings."""

from typing import Any

from octavo.request import limits

# A server need not hurry: what it loses is a caller that comes back, and leases tell which processes are gone.
SERVER_PING_MS = 10_000
SERVER_PATIENCE_MS = 20_000

Options = list[tuple[str, Any]]


def message_options(internal: bool) -> Options:
    size = limits.MAX_INTERNAL_MESSAGE_BYTES if internal else limits.MAX_MESSAGE_BYTES
    return [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]


def header_options(most: int) -> Options:
    """Without the second option, gRPC refuses headers between the limit and twice that at random."""
    return [("grpc.max_metadata_size", most), ("grpc.absolute_max_metadata_size", most)]


def keepalive_options(interval_ms: int, timeout_ms: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What gRPC in fact waits for the answer to a ping: of keepalive, and those that measure a busy connection.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
