"""Gets blocks of prompts from the prefix caches of other workers: for a prompt, and before this worker serves."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.calls.connection_pool import ConnectionPool, TargetConnection
from gpu_worker.migration.calls.targets import TargetPool, TargetWorker
from gpu_worker.migration.calls.transfer_calls import FetchRequest
from gpu_worker.migration.prefix.link_speeds import LinkSpeeds
from gpu_worker.migration.target.incoming_blocks import IncomingBlocks
from gpu_worker.scheduling.block_exchange import BlockImport
from gpu_worker.steps.runner import BlockMemory, RunnerInfo
from octavo.request.errors import Draining, Mismatch, NotFound, ServingError, TooManyMoves, TransferFailed
from octavo.request.ids import BlockHash, Incarnation

log = logging.getLogger(__name__)

MOST_FETCHES = 8
TTL_S = 4.0  # after which a ticket ends whose end has got lost here
# Before this worker serves:
FIRST_BLOCKS, MOST_BLOCKS = 32, 256  # of one fetch: twice as many as in the last one, if that was quick
LIST_S = 2.0  # how long a worker may take to list its blocks
FETCH_S = 2.0  # how long it may take to send those of one fetch: whoever is slower is slower than computing


class PrefixFetcher:
    """Fetches blocks, at most MOST_FETCHES times at once. What comes enters the prefix cache.

    No failure of another worker is an error here: what has not come is computed. Lives on the event loop.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        blocks: BlockPort,
        memory: BlockMemory,
        listener: BlockListener,
        targets: TargetPool,
        connections: ConnectionPool,
    ) -> None:
        self.targets = targets
        self.connections = connections
        self.num_fetched = 0  # blocks of prompts
        self.num_standby_fetched = 0  # blocks of standbys
        self._incarnation = incarnation
        self._blocks = blocks
        self._memory = memory
        self._listener = listener
        self._speeds = LinkSpeeds()
        self._num_fetches = 0
        self._coming: dict[BlockHash, asyncio.Event] = {}  # set when that fetch is over
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()  # the ends of tickets

    def allowed_s(self, owner: Incarnation, num_blocks: int, tokens_per_s: float) -> float:
        """How long a sequence may wait for so many blocks of another worker; 0.0: not at all. Any thread may ask."""
        if not num_blocks or owner == self._incarnation or self._closed or self._num_fetches >= MOST_FETCHES:
            return 0.0
        num_bytes, num_tokens = num_blocks * self._memory.bytes_per_block, num_blocks * self._blocks.info.block_size
        return self._speeds.allowed_s(owner, num_bytes, num_tokens, tokens_per_s)

    async def fetch(self, owner: Incarnation, hashes: Sequence[BlockHash], allowed_s: float) -> int:
        """Gets the blocks that are lacking here, in their order, as far as they come in time.

        Returns how many have come, if all went well. Blocks that are on their way already are waited for.
        """
        try:
            return await self.fetch_from(owner, hashes, allowed_s)
        except (ServingError, TimeoutError, OSError) as error:
            log.info("blocks of worker %s have not all come: %s", owner, str(error) or "not in time")
            return 0

    async def fetch_from(
        self, owner: Incarnation, hashes: Sequence[BlockHash], allowed_s: float, *, standby: bool = False
    ) -> int:
        """Fetches as `fetch` does. Raises ServingError, TimeoutError or OSError; blocks that have come until then stay.

        A caller that waits for blocks which are on their way already makes no further fetch. Raises TooManyMoves for
        one fetch more than MOST_FETCHES: several may have been allowed before the first of them began. Blocks of a
        `standby` take no room that somebody needs or keeps.
        """
        if self._closed:
            raise Draining("this worker ends")
        async with asyncio.timeout(allowed_s):
            while over := next((self._coming[each] for each in hashes if each in self._coming), None):
                await over.wait()
            if self._num_fetches >= MOST_FETCHES:
                raise TooManyMoves(f"this worker fetches {self._num_fetches} prefixes already")
            self._num_fetches += 1
            try:
                over = asyncio.Event()
                self._coming.update((each, over) for each in hashes)
                return await self._fetch_lacking(owner, hashes, allowed_s, over, standby)
            finally:
                self._num_fetches -= 1

    async def close(self) -> None:
        """Fetches nothing more. Whoever waits for a fetch is to be cancelled before. Nothing is held after this."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _fetch_lacking(
        self, owner: Incarnation, hashes: Sequence[BlockHash], allowed_s: float, over: asyncio.Event, standby: bool
    ) -> int:
        blocks = IncomingBlocks(secrets.randbits(64), self._blocks, self._memory, self._listener, TTL_S, note_loss)
        try:
            target = await self.targets.find(owner)
            held = await blocks.hold([hashes], to_keep=standby)
            if not held.wanted:
                return 0
            blocks.open_ticket()
            async with self.connections.connect(target) as connection:
                await self._ask(connection, blocks, held, allowed_s, standby)
            return len(held.sealed)
        finally:
            ending = asyncio.create_task(self._end(blocks, hashes, over, standby))
            self._tasks.add(ending)
            ending.add_done_callback(self._tasks.discard)

    async def _ask(
        self, connection: TargetConnection, blocks: IncomingBlocks, held: BlockImport, allowed_s: float, standby: bool
    ) -> None:
        """Has the other worker send the blocks, and measures how fast they come, unless it sends them last of all."""
        owner, info, began = connection.target.incarnation, self._blocks.info, time.monotonic()
        request = FetchRequest(
            self._incarnation,
            info.fingerprint,
            info.layout,
            blocks.number,
            blocks.secret,
            self._listener.port,
            held.wanted,
            info.numerics,
            standby,
        )
        says_nothing = False  # of the link
        try:
            await connection.client.fetch(request, allowed_s)
            blocks.close_ticket()
            await blocks.wait_until_sealed()
            says_nothing = not held.sealed
        except (TooManyMoves, Mismatch, NotFound):
            says_nothing = True
            raise
        finally:
            if not (says_nothing or standby or self._closed):
                num_bytes, seconds = len(held.sealed) * self._memory.bytes_per_block, time.monotonic() - began
                self._speeds.note_fetch(owner, num_bytes, seconds)
                log.debug("%d blocks of worker %s came in %.0f ms", len(held.sealed), owner, 1000 * seconds)

    async def _end(
        self, blocks: IncomingBlocks, hashes: Sequence[BlockHash], over: asyncio.Event, standby: bool
    ) -> None:
        """Lets go of the blocks that a fetch holds. The sequence that waits for the fetch does not wait for this."""
        try:
            await blocks.end()
        finally:
            num_come = len(blocks.held.sealed) if blocks.held is not None else 0
            if standby:
                self.num_standby_fetched += num_come
            else:
                self.num_fetched += num_come
            for each in hashes:
                self._coming.pop(each, None)
            over.set()


def note_loss(error: TransferFailed) -> None:
    """The other worker, which sends, hears of the loss as well, and its answer ends the fetch."""
    log.debug("blocks of another worker do not come any more: %s", error.message)


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
