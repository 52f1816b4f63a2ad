"""The files of a worker, and what writes and reads them."""

import logging
from collections.abc import Callable
from pathlib import Path

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.disk.block_files import BlockFiles
from gpu_worker.migration.disk.disk_reader import DiskReader
from gpu_worker.migration.disk.disk_writer import DiskWriter
from gpu_worker.migration.disk.file_list import FileList, Publish
from gpu_worker.steps.runner import BlockMemory
from octavo.request.errors import InvalidArgument

log = logging.getLogger(__name__)

FLUSH_S = 1.0  # for what is not written yet when the worker ends


class DiskTier:
    """Blocks of the prefix cache on the disk. Lives on the event loop."""

    def __init__(
        self,
        directory: str,
        most_bytes: int,
        blocks: BlockPort,
        memory: BlockMemory,
        publish: Publish,
        is_busy: Callable[[], bool],
    ) -> None:
        """`publish` is told which blocks have files: see `FileList`. `is_busy` says whether sequences run.

        Raises InvalidArgument if nothing can be written there.
        """
        try:
            self.files = BlockFiles(Path(directory), memory.bytes_per_block, most_bytes)
        except OSError as error:
            raise InvalidArgument("disk_tier", f"cannot be used: {error}") from error
        if not self.files.most_blocks:
            raise InvalidArgument("disk_tier_bytes", f"is less than a block, which has {memory.bytes_per_block} bytes")
        self.reader = DiskReader(self.files, blocks, memory)
        self.list = FileList(self.files, publish)
        self.writer = DiskWriter(self.files, self.list, blocks, memory, is_busy)
        log.info("prefixes are kept in %s, in %d blocks at most", directory, self.files.most_blocks)

    async def close(self, *, urgent: bool) -> None:
        """Writes what is not written yet, if there is time, and reads and writes nothing more."""
        if not urgent:
            await self.writer.flush(FLUSH_S)
        await self.writer.close()
        await self.reader.close()
