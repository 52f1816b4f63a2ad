"""What a worker's answer to Pool brings: vectors as they are computed, or the error that ended the call."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc

from octavo.pooling.params import PoolingParams
from octavo.request.errors import ServingError, Unreachable
from octavo.wire import statuses
from octavo.wire.pooling import PromptVector, pool_request, pooled_from_wire


async def read_vectors(
    method: Callable[..., Any],
    worker_id: str,
    prompts: Sequence[Sequence[int]],
    params: PoolingParams,
    *,
    salt: str,
    priority: int,
    deadline_in_ms: int,
) -> AsyncGenerator[list[PromptVector], None]:
    """The vectors of the prompts. Raises the ServingError of the call, or Unreachable where the worker sent none."""
    request = pool_request(prompts, params, salt=salt, priority=priority, deadline_in_ms=deadline_in_ms)
    try:
        call = method(request)
    except grpc.aio.UsageError as error:  # the link was closed meanwhile
        raise lost(worker_id) from error
    try:
        async for message in call:
            yield [pooled_from_wire(each) for each in message.vectors]
    except grpc.aio.AioRpcError as error:
        if statuses.is_of_octavo(error):
            raise statuses.error_from(error) from error
        raise lost(worker_id, error.code().name) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise lost(worker_id) from error  # the channel was closed, and this task was not cancelled
    finally:
        call.cancel()


def lost(worker_id: str, why: str = "its link was closed") -> ServingError:
    return Unreachable(f"worker {worker_id} is lost: {why}")
