"""Calls routers for a command: nothing waits in silence, and a wrong endpoint fails within seconds."""

import argparse
import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import grpc.aio

from octavo.cli import deployment
from octavo.cli.output import print_error
from octavo.client import Client, RetryPolicy
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.errors import NotFound, ServingError, Unreachable
from octavo.v1 import admin_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_channel

NOTICE_S = 1.0  # how long a command waits before it says so
TIMEOUT_S = 5.0
MAX_SECONDS = 1e6
CLOSED = ("Socket closed", "Connection reset", "Broken pipe")  # how gRPC tells of a server that expected TLS
HTTP_1 = "Trying to connect an http1.x server"
WAIT_LONGER = "or wait longer with --timeout"
CORRECT_ADMIN = f"correct --admin-endpoint, {WAIT_LONGER}"
NO_ADMIN = "this is not the Admin listener of a router: see --admin-listen"

Answer = TypeVar("Answer")


def add_timeout(parser: argparse.ArgumentParser) -> None:
    text = f"how long to try to connect [default: {TIMEOUT_S:g}]"
    parser.add_argument("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS", help=text)


def seconds(text: str) -> float:
    """The value of a flag that is a time. Raises argparse's error."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 2.5")
    return value


def add_admin_arguments(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], *, json: bool = True
) -> None:
    """What all commands take that ask routers on the Admin service."""
    deployment.add_state_dir(parser)
    parser.add_argument("--admin-endpoint", metavar="HOST:PORT[,...]", help="admin listeners of the routers to ask")
    deployment.add_credentials(parser)
    add_timeout(parser)
    if json:
        parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[Client]:
    """A client that is connected to a router. After a second it says on stderr that it still tries.

    Raises CommandError after --timeout. A connection that breaks later is tried again for minutes, which stderr
    tells, too.
    """
    cells = deployment.endpoints(args)
    notice = RetryNotice(args.command)
    credentials = deployment.credentials(args, PeerRole.CLIENT)
    with Client(cells, policy=RetryPolicy(on_retry=notice.retrying), credentials=credentials) as client:
        with delayed_notice(args, [name for cell in cells for name in cell]):
            try:
                client.connect(args.timeout)
            except Unreachable as error:
                remedy = f"correct --endpoint, {WAIT_LONGER}"
                if credentials.tls is None and any(text in error.message for text in CLOSED):
                    remedy = f"give --tls-ca if routers use TLS, {remedy}"
                if HTTP_1 in error.message:
                    remedy = (
                        "what answers there speaks HTTP/1: give --endpoint a router's port of gRPC, 50051 by default"
                    )
                raise CommandError(f"{error.message}: {remedy}") from None
        yield client


def ask_routers(args: argparse.Namespace, call: Callable[[admin_pb2_grpc.AdminStub], Awaitable[Answer]]) -> Answer:
    """The answer of the first router of the deployment that gives one.

    A router that is not reached, or that finds that it does not know the worker or the request, is followed by the
    next one. Any other refusal counts. Raises ServingError or CommandError.
    """
    return asyncio.run(_ask_routers(args, call))


async def _ask_routers(
    args: argparse.Namespace, call: Callable[[admin_pb2_grpc.AdminStub], Awaitable[Answer]]
) -> Answer:
    reasons, unknown = [], None
    addresses, credentials = deployment.admin_endpoints(args), deployment.credentials(args, PeerRole.OPERATOR)
    for address in addresses:
        try:
            async with open_channel(address, credentials=credentials) as channel:
                await await_ready(args, channel, address)
                return await call(admin_pb2_grpc.AdminStub(channel))
        except grpc.aio.AioRpcError as error:
            if statuses.status_in(error) is not None:
                refusal = statuses.error_from(error)
                if not isinstance(refusal, NotFound):
                    raise refusal from None
                unknown = refusal  # another router may know what this one has lost, or has not met yet
            else:
                remedy = "" if error.code() is grpc.StatusCode.UNIMPLEMENTED else f": {CORRECT_ADMIN}"
                reasons.append(f"{address}: {admin_fault(error)}{remedy}")
    if unknown is not None:
        raise unknown
    raise CommandError("; ".join(reasons))


def admin_fault(error: grpc.aio.AioRpcError) -> str:
    """Why a call of the Admin service got no answer of a router."""
    return NO_ADMIN if error.code() is grpc.StatusCode.UNIMPLEMENTED else error.details() or error.code().name


async def await_ready(args: argparse.Namespace, channel: grpc.aio.Channel, address: str) -> None:
    """Returns once the channel is connected, or after --timeout: the call that follows says why it is not."""
    with delayed_notice(args, [address]), suppress(TimeoutError):
        await asyncio.wait_for(channel.channel_ready(), args.timeout)


@contextmanager
def delayed_notice(args: argparse.Namespace, endpoints: list[str]) -> Iterator[threading.Timer]:
    """Says after a second that the endpoints do not answer, if the context lasts that long and does not cancel it."""
    text = f"{', '.join(endpoints)}: no answer yet; retrying, for {args.timeout:g} s in all"
    with notice(args.command, text) as timer:
        yield timer


@contextmanager
def notice(command: str, text: str) -> Iterator[threading.Timer]:
    """Prints the text after a second, if the context lasts that long and does not cancel it."""
    timer = threading.Timer(NOTICE_S, print_error, (command, text))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


class RetryNotice:
    """Says that a call is being retried, once it has failed for a second; again only after it has succeeded."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._told = False

    def retrying(self, error: ServingError, failing_s: float) -> None:
        """The client calls this before each new try, with the error and for how long the call has been failing."""
        if failing_s < NOTICE_S:
            self._told = False
        elif not self._told:
            self._told = True
            print_error(self._command, f"{error.message}; retrying")
