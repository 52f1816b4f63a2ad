"""`octavo drain WORKER`: gives the sequences of a worker to the others, and leaves the worker without work.

    octavo drain worker-0              until it is empty; then it can be stopped, and nobody notices
    octavo drain worker-0 --undo       it gets work again, as it does after a restart
    octavo drain --self                the worker that runs here, by its own OCTAVO_WORKER_*: what a pod does as it ends

WORKER is a name in `octavo status`. The process goes on, NOT_SERVING. SIGTERM to a worker drains it, too, and ends it.
"""

import argparse
from collections.abc import Callable

from octavo.cli import admin_calls, connection, deployment, output, self_drain
from octavo.process.command_error import CommandError
from octavo.request import limits
from octavo.v1 import admin_pb2, admin_pb2_grpc

GRACE_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("drain", help="give the sequences of a worker to the others", description=__doc__)
    parser.add_argument("worker", metavar="WORKER", nargs="?", help="its name, as `octavo status` shows it")
    parser.add_argument(
        "--self", dest="own", action="store_true", help="the worker that runs here; no router has to be reached"
    )
    parser.add_argument("--undo", action="store_true", help="let the worker have sequences again")
    parser.add_argument(
        "--grace",
        type=connection.seconds,
        default=GRACE_S,
        metavar="SECONDS",
        help="after this time what is left is released at once, and may wait in the queue [default: %(default)g]",
    )
    deployment.add_admin_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.grace * 1000 > limits.MAX_DRAIN_MS:
        raise CommandError(f"--grace: at most {limits.MAX_DRAIN_MS / 1000:g} seconds")
    if bool(args.worker) == args.own:
        raise CommandError("name a WORKER, as `octavo status` shows it, or give --self where the worker runs")
    worker = self_drain.own_settings(args) if args.own else None
    name = (worker.worker_id or "the worker here") if worker else args.worker
    tell = _progress_teller(args, name)
    if worker:
        left, moved, released = self_drain.drain_worker(args, worker, tell)
    else:
        left, moved, released = admin_calls.ask_routers(args, lambda admin: drain_worker(args, admin, tell))
    if args.json:
        output.print_json(
            {
                "worker_id": name,
                "draining": not args.undo,
                "num_left": left,
                "num_migrated": moved,
                "num_released": released,
            }
        )
    elif args.undo:
        print(f"{name} gets sequences again")
    else:
        print(f"{name} is drained. Sequences moved with their blocks: {moved}, released: {released}, left: {left}")
    return 0


async def drain_worker(
    args: argparse.Namespace, admin: admin_pb2_grpc.AdminStub, tell: Callable[[int], None]
) -> self_drain.DrainTally:
    """The last progress that one router reports."""
    request = admin_pb2.DrainWorkerRequest(worker_id=args.worker, grace_ms=int(args.grace * 1000), undo=args.undo)
    progress = admin_pb2.DrainWorkerResponse()
    async for progress in admin.DrainWorker(request):
        tell(progress.num_left)
    return self_drain.DrainTally(progress.num_left, progress.num_migrated, progress.num_released)


def _progress_teller(args: argparse.Namespace, name: str) -> Callable[[int], None]:
    """A function that says on stderr how many sequences are left, each number once."""
    told = -1

    def tell(num_left: int) -> None:
        nonlocal told
        if num_left != told and not (args.json or args.undo):
            told = num_left
            output.print_error(args.command, f"{name}: sequences left: {told}")

    return tell
