"""A worker that has just started gets the prefixes that others use, before it serves."""

import asyncio
import logging
import time

from gpu_worker.migrating.prefix_fetcher import PrefixFetcher
from gpu_worker.migrating.targets import TargetWorker
from gpu_worker.scheduling.step import RunnerInfo
from octavo.errors import ServingError

log = logging.getLogger(__name__)

BATCH_BLOCKS = 256  # of one fetch
LIST_S = 2.0  # how long a worker may take to list its blocks


async def warm_up(fetcher: PrefixFetcher, info: RunnerInfo, num_blocks: int, allowed_s: float) -> int:
    """Fetches up to so many blocks from the workers of the same model and layout. Returns how many have come.

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
    for num_before, worker in enumerate(workers):
        num_left = len(workers) - num_before
        share, share_s = (num_blocks - num_come) // num_left, (deadline - time.monotonic()) / num_left
        if share <= 0 or share_s <= 0:
            break
        num_come += await fetch_hot(fetcher, worker, info, share, share_s)
    if workers:
        log.info("%d blocks of prefixes have come from %d other workers", num_come, len(workers))
    return num_come


async def fetch_hot(
    fetcher: PrefixFetcher, worker: TargetWorker, info: RunnerInfo, num_blocks: int, allowed_s: float
) -> int:
    """Fetches what one worker uses most. Returns how many blocks have come."""
    before = fetcher.num_fetched
    try:
        async with asyncio.timeout(allowed_s):
            async with fetcher.connections.connect(worker) as connection:
                limit, timeout_s = info.num_blocks, min(LIST_S, allowed_s)
                hashes = await connection.client.list_hot(info.fingerprint, info.layout, limit, timeout_s)
            num_come = 0
            while hashes and num_come < num_blocks:
                size = min(BATCH_BLOCKS, num_blocks - num_come)
                num_come += await fetcher.fetch_from(worker.incarnation, hashes[:size], allowed_s)
                hashes = hashes[size:]
            return num_come
    except (ServingError, TimeoutError, OSError) as error:
        log.info("worker %s: its blocks are not fetched: %s", worker.incarnation, str(error) or "not in time")
    return fetcher.num_fetched - before
