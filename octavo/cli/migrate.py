"""`octavo migrate REQUEST_ID`: moves a running request to another worker with its blocks, in a pause of milliseconds.

    octavo migrate 4f0c                    to the worker that is best for it
    octavo migrate 4f0c --to worker-1      to that worker

REQUEST_ID is what the client sent, or what its first event had. WORKER is a name in `octavo status`. What cannot move
now runs on where it is, and the last line says why. `octavo drain` moves all requests of a worker.
"""

import argparse

from octavo.cli import admin_calls, connection, deployment, output
from octavo.v1 import admin_pb2, admin_pb2_grpc

KIB = 1024


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("migrate", help="move a running request to another worker", description=__doc__)
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the request to move")
    parser.add_argument("--to", default="", metavar="WORKER", help="where to [the worker that is best for it]")
    parser.add_argument("--tenant", default="", metavar="TENANT", help="whose request it is, where there are API keys")
    deployment.add_admin_arguments(parser)
    connection.add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = admin_pb2.MigrateRequest(request_id=args.request_id, worker_id=args.to, tenant=args.tenant)

    async def migrate(admin: admin_pb2_grpc.AdminStub) -> admin_pb2.MigrateResponse:
        with connection.notice(args.command, "the request runs on until its blocks are there"):
            moved: admin_pb2.MigrateResponse = await admin.Migrate(request)
        return moved

    moved = admin_calls.ask_routers(args, migrate)
    if args.json:
        output.print_json(
            {
                "request_id": args.request_id,
                "worker_id": moved.worker_id,
                "epoch": moved.epoch,
                "num_blocks": moved.num_blocks,
                "num_sent_blocks": moved.num_sent_blocks,
                "num_sent_bytes": moved.num_sent_bytes,
                "total_ms": round(moved.total_ms, 3),
                "stopped_ms": round(moved.stopped_ms, 3),
            }
        )
    else:
        sent = f"{moved.num_sent_blocks} of {moved.num_blocks} blocks ({moved.num_sent_bytes / KIB:.0f} KiB) were sent"
        times = f"stopped for {moved.stopped_ms:.0f} ms of {moved.total_ms:.0f} ms"
        print(f"{args.request_id} runs on {moved.worker_id} now: {sent}, {times}")
    return 0
