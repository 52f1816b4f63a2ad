"""`octavo drain WORKER`: gives the sequences of a worker to the others, and leaves the worker without work.

    octavo drain worker-0              until it is empty; then it can be stopped, and nobody notices
    octavo drain worker-0 --undo       it gets work again, as it does after a restart
    octavo drain --self                the worker that runs here, by its own OCTAVO_WORKER_*: what a pod does as it ends

WORKER is a name in `octavo status`. The process goes on, NOT_SERVING. SIGTERM to a worker drains it, too, and ends it.
"""

import argparse
import asyncio
from typing import NamedTuple

import grpc

from octavo.cli import connection, output
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.security.protection import tls_of
from octavo.process import listen_address
from octavo.process.command_error import CommandError
from octavo.request import limits
from octavo.settings.loading import from_args
from octavo.settings.worker import WorkerSettings
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire import statuses
from octavo.wire.channel import open_worker_channel
from octavo.wire.tls import TlsError

GRACE_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("drain", help="give the sequences of a worker to the others", description=__doc__)
    parser.add_argument("worker", metavar="WORKER", nargs="?", help="its name, as `octavo status` shows it")
    parser.add_argument(
        "--self", dest="own", action="store_true", help="the worker that runs here; no router has to be reached"
    )
    parser.add_argument("--undo", action="store_true", help="let the worker have sequences again")
    text = "after this time what is left is released at once, and may wait in the queue [default: %(default)g]"
    parser.add_argument("--grace", type=connection.seconds, default=GRACE_S, metavar="SECONDS", help=text)
    connection.add_admin_arguments(parser, run)


def run(args: argparse.Namespace) -> int:
    if args.grace * 1000 > limits.MAX_DRAIN_MS:
        raise CommandError(f"--grace: at most {limits.MAX_DRAIN_MS / 1000:g} seconds")
    if bool(args.worker) == args.own:
        raise CommandError("name a WORKER, as `octavo status` shows it, or give --self where the worker runs")
    if args.own:
        own = from_args(WorkerSettings, args)
        watch = _DrainWatch(args, own.worker_id or "the worker here")
        asyncio.run(_drain_own(args, own, watch))
    else:
        watch = _DrainWatch(args, args.worker)
        connection.ask_routers(args, lambda admin: _drain_named(args, admin, watch))
    last = watch.last
    if args.json:
        counts = {"num_left": last.left, "num_migrated": last.moved, "num_released": last.released}
        output.print_json({"worker_id": watch.name, "draining": not args.undo, **counts})
    elif args.undo:
        print(f"{watch.name} gets sequences again")
    else:
        moved = f"Sequences moved with their blocks: {last.moved}, released: {last.released}, left: {last.left}"
        print(f"{watch.name} is drained. {moved}")
    return 0


class DrainTally(NamedTuple):
    """Sequences that a drain has left on the worker, moved with their blocks, and released."""

    left: int
    moved: int
    released: int


class _DrainWatch:
    """The last progress that was reported. Says on stderr how many sequences are left, each number once."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.name = name
        self.last = DrainTally(0, 0, 0)
        self._args = args
        self._told = -1

    def note(self, progress: admin_pb2.DrainWorkerResponse | worker_pb2.DrainResponse) -> None:
        self.last = DrainTally(progress.num_left, progress.num_migrated, progress.num_released)
        if self.last.left != self._told and not (self._args.json or self._args.undo):
            self._told = self.last.left
            output.print_error(self._args.command, f"{self.name}: sequences left: {self._told}")


async def _drain_named(args: argparse.Namespace, admin: admin_pb2_grpc.AdminStub, watch: _DrainWatch) -> None:
    request = admin_pb2.DrainWorkerRequest(worker_id=args.worker, grace_ms=int(args.grace * 1000), undo=args.undo)
    async for progress in admin.DrainWorker(request):
        watch.note(progress)


async def _drain_own(args: argparse.Namespace, worker: WorkerSettings, watch: _DrainWatch) -> None:
    """Asks the worker of this machine: a pod empties its worker before it ends, whether or not a router is reachable.

    `worker` is what the worker itself reads, OCTAVO_WORKER_* or the file of OCTAVO_CONFIG: its address and certificate.
    """
    address = listen_address.reachable_address(worker.address)
    request = worker_pb2.DrainRequest(grace_ms=int(args.grace * 1000), undo=args.undo)
    try:
        async with open_worker_channel(address, tls_of(worker)) as channel:
            await connection.await_ready(args, channel, address)
            async for progress in worker_pb2_grpc.WorkerStub(channel).Drain(request):
                watch.note(progress)
    except TlsError as error:
        raise CommandError(str(error)) from None
    except grpc.aio.AioRpcError as error:
        if statuses.status_in(error) is not None:
            raise statuses.error_from(error) from None
        said = error.details() or error.code().name
        raise CommandError(f"{address}: {said}: this is where OCTAVO_WORKER_* say that a worker listens") from None
