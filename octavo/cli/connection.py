"""Calls routers for a command: nothing waits in silence, and a wrong endpoint fails within seconds."""

import argparse
import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc.aio

from octavo.cli import deployment
from octavo.cli.output import print_error
from octavo.client import Client, RetryPolicy
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.request.errors import ServingError, Unreachable

NOTICE_S = 1.0  # how long a command waits before it says so
TIMEOUT_S = 5.0
MAX_SECONDS = 1e6
CLOSED = ("Socket closed", "Connection reset", "Broken pipe")  # how gRPC tells of a server that expected TLS


def add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to try to connect [default: {TIMEOUT_S:g}]",
    )


def seconds(text: str) -> float:
    """The value of a flag that is a time. Raises argparse's error."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 2.5")
    return value


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
        with delayed_notice(args.command, [name for cell in cells for name in cell], args.timeout):
            try:
                client.connect(args.timeout)
            except Unreachable as error:
                remedy = "correct --endpoint, or wait longer with --timeout"
                if credentials.tls is None and any(text in error.message for text in CLOSED):
                    remedy = f"give --tls-ca if routers use TLS, {remedy}"
                raise CommandError(f"{error.message}: {remedy}") from None
        yield client


async def await_ready(args: argparse.Namespace, channel: grpc.aio.Channel, address: str) -> None:
    """Returns once the channel is connected, or after --timeout: the call that follows says why it is not."""
    with delayed_notice(args.command, [address], args.timeout), suppress(TimeoutError):
        await asyncio.wait_for(channel.channel_ready(), args.timeout)


@contextmanager
def delayed_notice(command: str, endpoints: list[str], timeout_s: float) -> Iterator[threading.Timer]:
    """Says after a second that the endpoints do not answer, if the context lasts that long and does not cancel it."""
    with notice(command, f"{', '.join(endpoints)}: no answer yet; retrying, for {timeout_s:g} s in all") as timer:
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
