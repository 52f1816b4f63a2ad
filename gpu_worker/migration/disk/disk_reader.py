"""Leading blocks of a sequence that are in files come into the prefix cache, where that is quicker than computing."""

import asyncio
import logging
import time
from collections.abc import Sequence

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.disk.block_files import BlockFiles
from gpu_worker.migration.prefix.link_speeds import LinkSpeeds
from gpu_worker.scheduling.block_exchange import BlockImport, WantedBlock
from gpu_worker.steps.runner import BlockMemory
from octavo.request.errors import ServingError
from octavo.request.ids import BlockHash, Incarnation

log = logging.getLogger(__name__)

READ_BYTES = 16 << 20  # of one turn, or one block: what has been read is known to the prefix cache after it
MOST_S = 10.0  # a sequence waits no longer: what has come until then is of use in any case
DISK = Incarnation("disk")  # stands for it where speeds are measured


class DiskReader:
    """Reads for one sequence at a time: those that wait for the same blocks find them in the prefix cache.

    No failure of the disk is an error here: what has not come is computed. Lives on the event loop.
    """

    def __init__(self, files: BlockFiles, blocks: BlockPort, memory: BlockMemory) -> None:
        self.num_read = 0  # blocks
        self.num_failed = 0  # reads that the disk has refused
        self._files = files
        self._blocks = blocks
        self._memory = memory
        self._speeds = LinkSpeeds()
        self._per_turn = max(1, READ_BYTES // max(1, memory.bytes_per_block))
        self._turn = asyncio.Lock()
        self._reads: set[asyncio.Task[int]] = set()
        self._closed = False

    async def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks are in files."""
        return await asyncio.to_thread(self._files.num_leading, hashes)

    def allowed_s(self, num_blocks: int, tokens_per_s: float) -> float:
        """How long a sequence may wait for so many blocks; 0.0: not at all. Any thread may ask."""
        if not num_blocks or self._closed:
            return 0.0
        num_bytes, num_tokens = num_blocks * self._memory.bytes_per_block, num_blocks * self._blocks.info.block_size
        return self._speeds.allowed_s(DISK, num_bytes, num_tokens, tokens_per_s, MOST_S)

    async def fetch(self, hashes: Sequence[BlockHash], allowed_s: float, *, to_keep: bool = False) -> int:
        """Reads the blocks that are lacking here, in their order, as far as time allows. Returns how many have come.

        With `to_keep` no sequence waits for them. A caller that is cancelled leaves the read to its end.
        """
        read = asyncio.create_task(self._fetch(hashes, time.monotonic() + allowed_s, to_keep))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        return await asyncio.shield(read)

    async def warm_up(self, num_blocks: int, allowed_s: float) -> int:
        """Reads up to so many of the blocks that were used last. Never raises. Returns how many have come."""
        began = time.monotonic()
        try:
            latest = await asyncio.to_thread(self._files.latest, num_blocks)
        except OSError as error:
            log.warning("no blocks are read from the disk: %s", error)
            return 0
        num_come = await self.fetch(latest, allowed_s, to_keep=True)
        if num_come:
            log.info("%d blocks of prefixes have come from the disk in %.1f s", num_come, time.monotonic() - began)
        return num_come

    async def close(self) -> None:
        """Reads nothing more. Nothing is held after this."""
        self._closed = True
        if self._reads:
            await asyncio.wait(self._reads)

    async def _fetch(self, hashes: Sequence[BlockHash], deadline: float, to_keep: bool) -> int:
        async with self._turn:
            if self._closed or time.monotonic() >= deadline:
                return 0
            try:
                held = await self._blocks.hold_import([hashes], to_keep=to_keep)
            except ServingError as error:
                log.debug("no blocks are read from the disk: %s", error.message)
                return 0
            try:
                return await self._read_wanted(held, deadline)
            except ServingError as error:
                log.debug("no more blocks are read from the disk: %s", error.message)
            except OSError as error:
                self.num_failed += 1
                log.warning("no more blocks are read from the disk: %s", error)
            finally:
                self.num_read += len(held.sealed)
                await self._blocks.release_import(held)
            return len(held.sealed)

    async def _read_wanted(self, held: BlockImport, deadline: float) -> int:
        began, num_tried = time.monotonic(), 0
        for first in range(0, len(held.wanted), self._per_turn):
            if self._closed or time.monotonic() >= deadline:
                break
            wanted = held.wanted[first : first + self._per_turn]
            come = await asyncio.to_thread(self._read_some, held, wanted)
            await self._blocks.seal_imported(held, come)
            num_tried += len(wanted)
            if len(come) < len(wanted):
                break  # what follows a gap is of no use
        num_bytes, seconds = len(held.sealed) * self._memory.bytes_per_block, time.monotonic() - began
        if num_bytes:
            self._speeds.note_fetch(DISK, num_bytes, seconds)
            log.debug("%d of %d blocks came from the disk in %.0f ms", len(held.sealed), num_tried, 1000 * seconds)
        return len(held.sealed)

    def _read_some(self, held: BlockImport, wanted: Sequence[WantedBlock]) -> list[int]:
        """The indexes of those that have come, up to the first that has not."""
        come: list[int] = []
        for each in wanted:
            block = held.block_of(each.index)
            runs = self._memory.open_block(block)
            try:
                if not self._files.read(each.block_hash, runs):
                    return come
                self._memory.keep_block(block)
            finally:
                self._memory.close_block(block)
            come.append(each.index)
        return come
