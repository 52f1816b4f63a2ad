"""Asks the worker of this machine to drain, for `octavo drain --self`: a pod empties its worker before it ends.

The command reads what the worker reads, OCTAVO_WORKER_* or the file of OCTAVO_CONFIG, and so knows the address and the
certificate of the worker. No router takes part, and none has to be reachable.
"""

import argparse
import asyncio
from collections.abc import Callable
from typing import NamedTuple

import grpc

from octavo.cli import connection
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.security.protection import tls_of
from octavo.process import listen_address
from octavo.process.command_error import CommandError
from octavo.settings.loading import from_args
from octavo.settings.worker import WorkerSettings
from octavo.wire import statuses
from octavo.wire.channel import open_worker_channel
from octavo.wire.tls import TlsError


class DrainTally(NamedTuple):
    """Sequences that a drain has left on the worker, moved with their blocks, and released."""

    left: int
    moved: int
    released: int


def own_settings(args: argparse.Namespace) -> WorkerSettings:
    """What the worker of this machine was told by variables and file. Raises SettingsError."""
    return from_args(WorkerSettings, args)


def drain_worker(args: argparse.Namespace, worker: WorkerSettings, tell: Callable[[int], None]) -> DrainTally:
    """The last progress that the worker reports; `tell` gets what is left, each time. Raises ServingError or
    CommandError.
    """
    return asyncio.run(_drain(args, worker, tell))


async def _drain(args: argparse.Namespace, worker: WorkerSettings, tell: Callable[[int], None]) -> DrainTally:
    address = listen_address.reachable_address(worker.address)
    request = worker_pb2.DrainRequest(grace_ms=int(args.grace * 1000), undo=args.undo)
    progress = worker_pb2.DrainResponse()
    try:
        async with open_worker_channel(address, tls_of(worker)) as channel:
            await connection.await_ready(args, channel, address)
            async for progress in worker_pb2_grpc.WorkerStub(channel).Drain(request):
                tell(progress.num_left)
    except TlsError as error:
        raise CommandError(str(error)) from None
    except grpc.aio.AioRpcError as error:
        if statuses.status_in(error) is not None:
            raise statuses.error_from(error) from None
        said = error.details() or error.code().name
        raise CommandError(f"{address}: {said}: this is where OCTAVO_WORKER_* say that a worker listens") from None
    return DrainTally(progress.num_left, progress.num_migrated, progress.num_released)
