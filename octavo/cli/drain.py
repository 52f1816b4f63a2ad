"""`octavo drain WORKER`: gives the sequences of a worker to the others, and leaves the worker without work.

    octavo drain worker-0              until it is empty; then it can be stopped, and nobody notices
    octavo drain worker-0 --undo       it gets work again, as it does after a restart

WORKER is a name in `octavo status`. The process goes on, NOT_SERVING. SIGTERM to a worker drains it, too, and ends it.
"""

import argparse
import asyncio

import grpc

from octavo import limits, rpc, statuses
from octavo.cli import connection, deployment, output
from octavo.cli.command_error import CommandError
from octavo.errors import NotFound
from octavo.v1 import admin_pb2, admin_pb2_grpc

GRACE_S = 60.0


class DrainError(CommandError):
    """No router has drained the worker. The message says why, and what to do."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "drain",
        help="give the sequences of a worker to the others",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("worker", metavar="WORKER", help="its name, as `octavo status` shows it")
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
        raise DrainError(f"--grace: at most {limits.MAX_DRAIN_MS / 1000:g} seconds")
    if args.admin_endpoint:
        addresses = deployment.split_endpoints("--admin-endpoint", args.admin_endpoint)
    else:
        addresses = [router.admin_endpoint for router in deployment.running(args, "--admin-endpoint").routers]
    progress = asyncio.run(drain_worker(args, addresses))
    if args.json:
        output.print_json(
            {
                "worker_id": args.worker,
                "draining": not args.undo,
                "num_left": progress.num_left,
                "num_released": progress.num_released,
            }
        )
    elif args.undo:
        print(f"{args.worker} gets sequences again")
    else:
        print(
            f"{args.worker} is drained: {progress.num_released} sequences were released, {progress.num_left} are left"
        )
    return 0


async def drain_worker(args: argparse.Namespace, addresses: list[str]) -> admin_pb2.DrainWorkerResponse:
    """The last progress. Asks one router after the other, until one is reached that knows the worker.

    Raises ServingError or DrainError.
    """
    reasons, unknown = [], None
    for address in addresses:
        try:
            return await _drain_by(args, address)
        except grpc.aio.AioRpcError as error:
            if statuses.status_in(error) is not None:
                refusal = statuses.error_from(error)
                if not isinstance(refusal, NotFound):
                    raise refusal from None
                unknown = refusal  # another router may know a worker that this one has lost, or has not met yet
            else:
                reasons.append(f"{address}: {_reason(error, args.timeout)}")
    if unknown is not None:
        raise unknown
    raise DrainError("; ".join(reasons))


async def _drain_by(args: argparse.Namespace, address: str) -> admin_pb2.DrainWorkerResponse:
    request = admin_pb2.DrainWorkerRequest(worker_id=args.worker, grace_ms=int(args.grace * 1000), undo=args.undo)
    progress, told = admin_pb2.DrainWorkerResponse(), -1
    async with rpc.channel(address) as channel:
        with connection.delayed_notice(args.command, [address], args.timeout):
            try:
                await asyncio.wait_for(channel.channel_ready(), args.timeout)
            except TimeoutError:
                pass  # the call says why
        async for progress in admin_pb2_grpc.AdminStub(channel).DrainWorker(request):
            if progress.num_left != told and not (args.json or args.undo):
                told = progress.num_left
                output.print_error(args.command, f"{args.worker}: {told} sequences left")
    return progress


def _reason(error: grpc.aio.AioRpcError, timeout_s: float) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "this is not the Admin listener of a router: see --admin-listen"
    return f"{error.details() or error.code().name}: correct --admin-endpoint, or wait longer with --timeout"
