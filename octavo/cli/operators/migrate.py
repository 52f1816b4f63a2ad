"""`octavo migrate REQUEST_ID`: moves a running request to another worker with its blocks, in a pause of milliseconds.

    octavo migrate 4f0c                    to the worker that is best for it
    octavo migrate 4f0c --to worker-1      to that worker

REQUEST_ID is what the client sent, or what its first event had. WORKER is a name in `octavo status`. What cannot move
now runs on where it is, and the last line says why. `octavo drain` moves all requests of a worker.
"""

import argparse

from octavo.cli import connection, output
from octavo.v1 import admin_pb2, admin_pb2_grpc

KIB = 1024
COUNTS = ("worker_id", "epoch", "num_blocks", "num_sent_blocks", "num_sent_bytes")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("migrate", help="move a running request to another worker", description=__doc__)
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the request to move")
    parser.add_argument("--to", default="", metavar="WORKER", help="where to [the worker that is best for it]")
    parser.add_argument("--tenant", default="", metavar="TENANT", help="whose request it is, where there are API keys")
    connection.add_admin_arguments(parser, run)


def run(args: argparse.Namespace) -> int:
    request = admin_pb2.MigrateRequest(request_id=args.request_id, worker_id=args.to, tenant=args.tenant)

    async def migrate(admin: admin_pb2_grpc.AdminStub) -> admin_pb2.MigrateResponse:
        with connection.notice(args.command, "the request runs on until its blocks are there"):
            moved: admin_pb2.MigrateResponse = await admin.Migrate(request)
        return moved

    moved = connection.ask_routers(args, migrate)
    if args.json:
        times = {name: round(getattr(moved, name), 3) for name in ("total_ms", "stopped_ms")}
        counts = {name: getattr(moved, name) for name in COUNTS}
        output.print_json({"request_id": args.request_id, **counts, **times})
    else:
        sent = f"{moved.num_sent_blocks} of {moved.num_blocks} blocks ({moved.num_sent_bytes / KIB:.0f} KiB) were sent"
        stopped = f"stopped for {moved.stopped_ms:.0f} ms of {moved.total_ms:.0f} ms"
        print(f"{args.request_id} runs on {moved.worker_id} now: {sent}, {stopped}")
    return 0
