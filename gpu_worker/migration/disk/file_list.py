"""Which blocks have files here: what routers are told, so that a prompt goes where its prefix can be read.

What this worker writes is noted at once. A file comes and goes also by other workers of this host, and by people. So
the folders are looked at now and then, those that have changed: a name that is written or removed changes the time of
its folder.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from gpu_worker.migration.disk.block_files import BlockFiles, folder_of
from octavo.request.ids import BlockHash

log = logging.getLogger(__name__)

LOOK_S = 30.0  # how often the folders are looked at: that may take a tenth of a second
MOST_TOLD = 32_768  # blocks; of more, those that came last. A router has so many of each worker in memory
SETTLED_S = 1.0  # a folder that changed less long ago may change again without another time

Publish = Callable[[Sequence[BlockHash], Sequence[BlockHash]], None]


class FileList:
    """`publish` gets the blocks that are to be told, and those that are not any more. Lives on the event loop."""

    def __init__(self, files: BlockFiles, publish: Publish) -> None:
        self._files = files
        self._publish = publish
        self._names: dict[str, set[BlockHash]] = {}  # by folder
        self._settled: dict[str, int] = {}  # by folder: when it changed last, if all of its names are here
        self._told: dict[BlockHash, None] = {}  # those that were told first come first
        self.num_gone = 0  # files that looks have missed
        self._looking = asyncio.Lock()

    def has(self, block_hash: BlockHash) -> bool:
        """Whether the block had a file when that was last looked at, or written."""
        return block_hash in self._names.get(folder_of(block_hash), ())

    async def note_written(self, hashes: Sequence[BlockHash]) -> None:
        """Tells that blocks have files now."""
        async with self._looking:
            come = [each for each in hashes if not self.has(each)]
            for each in come:
                self._names.setdefault(folder_of(each), set()).add(each)
            self._tell(come, set())

    async def run(self) -> None:
        """Looks for as long as the worker lives."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Tells what has changed since the last look. Never raises."""
        async with self._looking:
            try:
                come, gone = await asyncio.to_thread(self._changes)
            except OSError as error:
                log.warning("the files of blocks cannot be listed: %s", error)
                return
            self.num_gone += len(gone)
            self._tell(come, gone)

    def _changes(self) -> tuple[list[BlockHash], set[BlockHash]]:
        """The blocks that have come, those that were used last at the end, and those that have gone."""
        folders, now_ns = self._files.folders(), time.time_ns()
        come: dict[BlockHash, float] = {}
        gone: set[BlockHash] = set()
        names: dict[str, set[BlockHash]] = {}
        for folder in [each for each in self._names if each not in folders]:
            gone |= self._names[folder]
            names[folder] = set()
        for folder, changed_ns in folders.items():
            if self._settled.get(folder) != changed_ns:
                before = self._names.get(folder, set())
                still, others = self._files.list_folder(folder, before)
                gone |= before - still
                come |= others
                names[folder] = still | others.keys()
        self._names |= names
        self._settled = {each: at for each, at in folders.items() if now_ns - at > 1e9 * SETTLED_S}
        return sorted(come, key=come.__getitem__), gone

    def _tell(self, come: Sequence[BlockHash], gone: set[BlockHash]) -> None:
        removed = [each for each in gone if each in self._told]
        for each in removed:
            del self._told[each]
        written = list(come[-MOST_TOLD:])
        self._told.update(dict.fromkeys(written))
        for each in list(self._told)[: max(0, len(self._told) - MOST_TOLD)]:
            del self._told[each]
            removed.append(each)
        if written or removed:
            self._publish(written, removed)
