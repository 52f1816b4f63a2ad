"""Blocks of the prefix cache go into files, beside what the worker does: those that are worth most first."""

import asyncio
import logging
import time
from collections.abc import Callable

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.disk.block_files import BlockFiles
from gpu_worker.migration.disk.file_list import FileList
from gpu_worker.scheduling.block_exchange import PinnedBlocks
from gpu_worker.steps.runner import BlockMemory
from octavo.process.loop import shared
from octavo.request.errors import ServingError
from octavo.request.ids import BlockHash

log = logging.getLogger(__name__)

ROUND_S = 0.5  # how often the prefix cache is looked at
WRITE_BYTES = 4 << 20  # of one turn, or one block: so long it is pinned
# A pause after each turn, in times of its processor time: while sequences run a writer takes 3 % of a core,
# else a quarter.
BUSY_PAUSE_FACTOR = 32.0
IDLE_PAUSE_FACTOR = 3.0
RETRY_S = 30.0  # how long a disk that has failed is left alone


class DiskWriter:
    """Writes what is known on the device and not in files. Lives on the event loop."""

    def __init__(
        self, files: BlockFiles, listed: FileList, blocks: BlockPort, memory: BlockMemory, is_busy: Callable[[], bool]
    ) -> None:
        self.num_written = 0  # blocks
        self.num_failed = 0  # turns that the disk has refused
        self._files = files
        self._list = listed
        self._blocks = blocks
        self._memory = memory
        self._is_busy = is_busy
        self._most = min(blocks.info.num_blocks, files.most_blocks)
        self._per_turn = max(1, WRITE_BYTES // max(1, memory.bytes_per_block))
        self._seen: tuple[int, int] | None = None  # the prefix cache and the files when all of it was in files
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Goes round for as long as the worker lives."""
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                while not await self.write_some(ROUND_S):
                    pass
            except ServingError as error:
                log.debug("no blocks are written to the disk in this round: %s", error.message)
            except Exception as error:  # a file is worth no sequence of this worker
                self.num_failed += 1
                log.warning("no blocks are written to the disk for %g s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def write_some(self, seconds: float, *, pauses: bool = True) -> bool:
        """Writes what is lacking, for about so long: then others may be worth more. Says whether that was all.

        Raises ServingError if the engine has ended, or OSError.
        """
        now, ends_at = (self._blocks.known_digest, self._list.num_gone), time.monotonic() + seconds
        if now == self._seen:
            return True
        hashes = await self._blocks.hottest_blocks(self._most)
        lacking = [each for each in hashes if not self._list.has(each)]
        for first in range(0, len(lacking), self._per_turn):
            if time.monotonic() >= ends_at:
                return False
            used_s = await shared(asyncio.create_task(self._write_turn(lacking[first : first + self._per_turn])))
            if pauses:
                pause_factor = BUSY_PAUSE_FACTOR if self._is_busy() else IDLE_PAUSE_FACTOR
                await asyncio.sleep(pause_factor * used_s)
        self._seen = now
        return True

    async def flush(self, allowed_s: float) -> None:
        """Writes what is lacking without pauses, for so long at most. Never raises."""
        try:
            async with asyncio.timeout(allowed_s):
                await self.write_some(allowed_s, pauses=False)
        except (ServingError, OSError, TimeoutError) as error:
            log.info("not all blocks were written to the disk: %s", str(error) or f"not within {allowed_s:g} s")

    async def close(self) -> None:
        """Waits until nothing reads blocks any more. Whoever runs this is to be cancelled before."""
        async with self._writing:
            pass

    async def _write_turn(self, hashes: list[BlockHash]) -> float:
        """The processor time that it took. It goes on if its caller is cancelled: `close` waits for it."""
        async with self._writing:
            pinned = await self._blocks.pin_blocks(hashes)
            try:
                used_s = await asyncio.to_thread(self._write_pinned, pinned)
            finally:
                await self._blocks.unpin(pinned)
            await self._list.note_written(list(pinned.blocks))
            return used_s

    def _write_pinned(self, pinned: PinnedBlocks) -> float:
        began = time.thread_time()
        found = list(pinned.blocks.items())
        turn = self._memory.blocks_per_turn
        for first in range(0, len(found), turn):
            some = found[first : first + turn]
            with self._memory.read_blocks([block for _, block in some]) as blocks:
                for (block_hash, _), runs in zip(some, blocks, strict=True):
                    if not self._files.has(block_hash):  # another worker may have written it
                        self._files.write(block_hash, runs)
                        self.num_written += 1
        return time.thread_time() - began
