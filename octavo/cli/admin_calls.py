"""Calls the Admin service for a command: one router after the other, until one is reached that knows what is named."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from octavo.cli import connection, deployment
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.errors import NotFound
from octavo.v1 import admin_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel
from octavo.wire.tls import ClientCredentials

Answer = TypeVar("Answer")


def ask_routers(args: argparse.Namespace, call: Callable[[admin_pb2_grpc.AdminStub], Awaitable[Answer]]) -> Answer:
    """The answer of the first router of the deployment that gives one.

    A router that is not reached, or that finds that it does not know the worker or the request, is followed by the
    next one. Any other refusal counts. Raises ServingError or CommandError.
    """
    return asyncio.run(
        _ask(args, deployment.admin_endpoints(args), deployment.credentials(args, PeerRole.OPERATOR), call)
    )


async def _ask(
    args: argparse.Namespace,
    addresses: list[str],
    credentials: ClientCredentials,
    call: Callable[[admin_pb2_grpc.AdminStub], Awaitable[Answer]],
) -> Answer:
    reasons, unknown = [], None
    for address in addresses:
        try:
            async with open_channel(address, credentials=credentials) as channel:
                await connection.await_ready(args, channel, address)
                return await call(admin_pb2_grpc.AdminStub(channel))
        except grpc.aio.AioRpcError as error:
            if statuses.status_in(error) is not None:
                refusal = statuses.error_from(error)
                if not isinstance(refusal, NotFound):
                    raise refusal from None
                unknown = refusal  # another router may know what this one has lost, or has not met yet
            else:
                reasons.append(f"{address}: {_reason(error)}")
    if unknown is not None:
        raise unknown
    raise CommandError("; ".join(reasons))


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "this is not the Admin listener of a router: see --admin-listen"
    return f"{error.details() or error.code().name}: correct --admin-endpoint, or wait longer with --timeout"
