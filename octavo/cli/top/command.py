"""`octavo top`: workers and their blocks, the queue, sequences and their moves, live. Ctrl-C ends it.

octavo top                 of the `octavo up` on this machine
octavo top --admin-endpoint HOST:51051
octavo top --once          one frame; --json: one view, with all its fields
"""

import argparse
import asyncio
import signal
import sys
import threading
from contextlib import aclosing
from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.cli import connection, deployment
from octavo.cli.top.cluster_figures import ClusterFigures
from octavo.cli.top.cluster_reader import ClusterReader
from octavo.net.security.roles import PeerRole
from octavo.process.command_error import CommandError
from octavo.wire.message_json import message_json

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_S = 1.0
ENDS = (signal.SIGTERM, signal.SIGHUP)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("top", help="watch workers, queue and sequences live", description=__doc__)
    parser.add_argument("--once", action="store_true", help="print one frame, after one interval")
    parser.add_argument("--json", action="store_true", help="print one object: what Admin.WatchCluster sends")
    text = "time between two frames, at least 0.2 [default: %(default)g]"
    parser.add_argument("--interval", type=connection.seconds, default=INTERVAL_S, metavar="SECONDS", help=text)
    connection.add_admin_arguments(parser, run, json=False)


def run(args: argparse.Namespace) -> int:
    if not args.json:
        require_screen(once=args.once)
    endpoints = deployment.admin_endpoints(args)
    credentials = deployment.credentials(args, PeerRole.OPERATOR)
    reader = ClusterReader(endpoints, args.timeout, args.interval, credentials)
    with connection.delayed_notice(args, endpoints) as notice:
        if args.json:
            asyncio.run(_print_json(reader))
        elif args.once:
            asyncio.run(_print_once(reader, notice))
        else:
            try:
                asyncio.run(_show_live(reader, notice))
            except (KeyboardInterrupt, asyncio.CancelledError):
                return 0  # that is how one leaves it
    return 0


def require_screen(*, once: bool) -> None:
    """Raises CommandError unless frames can be drawn."""
    if find_spec("rich") is None:
        raise CommandError("the screen needs Rich: pip install 'octavo[top]'; --json does without")
    if not once and not sys.stdout.isatty():
        raise CommandError("stdout is no terminal: give --once or --json")


async def _print_json(reader: ClusterReader) -> None:
    async with aclosing(reader.readings()) as readings:
        reading = await anext(readings)
        sys.stdout.write(message_json(reading.view).decode() + "\n")


async def _print_once(reader: ClusterReader, notice: threading.Timer) -> None:
    from octavo.cli.top.screen import frame_of

    figures, console = ClusterFigures(), _console()
    async with aclosing(reader.readings()) as readings:
        for _ in range(2):  # rates are those between two views
            reading = await anext(readings)
            notice.cancel()
            figures.add(reading.view)
    console.print(frame_of(reading, figures, console))


async def _show_live(reader: ClusterReader, notice: threading.Timer) -> None:
    from rich.live import Live

    from octavo.cli.top.screen import frame_of

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    for number in ENDS:  # so that the terminal gets its own screen back
        loop.add_signal_handler(number, lambda: task and task.cancel())
    figures, console = ClusterFigures(), _console()
    async with aclosing(reader.readings()) as readings:
        reading = await anext(readings)
        notice.cancel()
        with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live:
            while True:
                if not reading.trouble:
                    figures.add(reading.view)
                live.update(frame_of(reading, figures, console, console.height), refresh=True)
                reading = await anext(readings)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
