"""A worker that has just started gets the prefixes that others use, before it serves."""

import asyncio
import logging
import time

from gpu_worker.migration.calls.targets import TargetWorker
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.errors import ServingError

log = logging.getLogger(__name__)

FIRST_BLOCKS, MOST_BLOCKS = 32, 256  # of one fetch: twice as many as in the last one, if that was quick
LIST_S = 2.0  # how long a worker may take to list its blocks
FETCH_S = 2.0  # how long it may take to send those of one fetch: whoever is slower is slower than computing


async def warm_up(fetcher: PrefixFetcher, info: RunnerInfo, num_blocks: int, allowed_s: float) -> int:
    """Fetches up to so many blocks from the workers of the same model, layout and numerics. Returns how many have come.

    Each of them gets an equal share of the blocks and of the time that are left. Never raises: whatever does not come
    is computed when it is asked for.
    """
    deadline, num_come = time.monotonic() + allowed_s, 0
    try:
        async with asyncio.timeout(allowed_s):
            workers = await fetcher.targets.candidates()
    except (ServingError, TimeoutError) as error:
        log.warning("no blocks are fetched from other workers: %s", str(error) or "the store does not answer")
        return 0
    if workers:
        log.info("prefixes come from %d other workers before this one serves, for up to %g s", len(workers), allowed_s)
    for num_before, worker in enumerate(workers):
        num_left = len(workers) - num_before
        share, share_s = (num_blocks - num_come) // num_left, (deadline - time.monotonic()) / num_left
        if share <= 0 or share_s <= 0:
            break
        num_come += await fetch_hot(fetcher, worker, info, share, share_s)
    if workers:
        seconds = allowed_s - (deadline - time.monotonic())
        log.info("%d blocks of prefixes have come from %d other workers in %.1f s", num_come, len(workers), seconds)
    return num_come


async def fetch_hot(
    fetcher: PrefixFetcher, worker: TargetWorker, info: RunnerInfo, num_blocks: int, allowed_s: float
) -> int:
    """Fetches what one worker uses most, for as long as it is quick. Returns how many blocks have come."""
    before = fetcher.num_fetched
    try:
        async with asyncio.timeout(allowed_s):
            async with fetcher.connections.connect(worker) as connection:
                served = info.fingerprint, info.layout, info.numerics
                hashes = await connection.client.list_hot(*served, info.num_blocks, min(LIST_S, allowed_s))
            num_come, size = 0, FIRST_BLOCKS
            while hashes and num_come < num_blocks:
                size, began = min(size, num_blocks - num_come), time.monotonic()
                num_come += await fetcher.fetch_from(worker.incarnation, hashes[:size], FETCH_S)
                hashes = hashes[size:]
                if time.monotonic() - began < FETCH_S / 4:
                    size = min(2 * size, MOST_BLOCKS)
            return num_come
    except (ServingError, TimeoutError, OSError) as error:
        reason = str(error) or "it is too slow"
        log.info("worker %s: no more of its blocks are fetched: %s", worker.incarnation, reason)
    return fetcher.num_fetched - before
