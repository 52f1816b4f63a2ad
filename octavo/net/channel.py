"""Channels of gRPC. A status comes out of a call as the ServingError that it was.

async with open_channel(endpoint) as channel:
    with statuses.serving_errors():
        await stub.Complete(request)
"""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from octavo.net.connection_options import Options, header_options, keepalive_options, message_options
from octavo.net.security.authorizer import KEY_HEADER
from octavo.net.security.client_credentials import PLAIN, ClientCredentials
from octavo.net.security.renewed_channel import RenewedChannel
from octavo.net.security.roles import WORKER_NAME
from octavo.net.security.tls import TlsFiles
from octavo.request import limits

# A caller leaves a peer that hangs within PING_MS + PATIENCE_MS, whether data flow or not. gRPC's own threads answer
# pings, so a busy interpreter delays none: 0 of 24 connections were lost in 10 minutes beside six busy processes.
PING_MS = 1_000
PATIENCE_MS = 2_000


# The client's side


def open_channel(
    endpoint: str,
    *,
    internal: bool = False,
    credentials: ClientCredentials = PLAIN,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """A channel that notices a dead peer within 3 s and a returned one within 1 s. `options` are added to its own."""
    options = [*channel_options(internal=internal), *options]
    tls, name, api_key = credentials.tls, credentials.server_name, credentials.api_key
    if tls is None and not api_key:
        return grpc.aio.insecure_channel(endpoint, options=options)
    if tls is not None and name:
        options += [("grpc.ssl_target_name_override", name)]

    def connect(security: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if security is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, security, options=options)

    return RenewedChannel(connect, tls, [(KEY_HEADER, f"Bearer {api_key}")] if api_key else [])


def open_worker_channel(
    endpoint: str, tls: TlsFiles | None = None, *, unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to a worker, for routers and other workers. With `tls`, the peer must have a worker's certificate.

    With `unread_bytes`, a call's messages wait in the worker while so much is unread here. Without, gRPC lets
    megabytes be on their way where the network is fast.
    """
    options = []
    if unread_bytes is not None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", unread_bytes)]
    return open_channel(endpoint, internal=True, credentials=ClientCredentials(tls, WORKER_NAME), options=options)


def channel_options(*, internal: bool = False) -> Options:
    """The options of `open_channel`, for blocking ones: grpc.insecure_channel(endpoint, options=channel_options())."""
    return [
        *message_options(internal),
        *keepalive_options(PING_MS, PATIENCE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # bounds one attempt to connect; a refused attempt ends at once
        ("grpc.max_reconnect_backoff_ms", 1_000),
        *header_options(2 * limits.MAX_METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),  # an http_proxy variable is meant for the web, and would capture 127.0.0.1 too
    ]
