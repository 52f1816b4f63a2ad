"""A file for each block, named by its hash. Any thread, and any number of workers with the same directory.

    DIR/5f/5f0c…        magic, checksum, and the bytes of the block
    DIR/5f/5f0c….part-… one that is being written; it becomes the other by a rename

A file is whole or not there: what a crash has torn has another length or another checksum, and is removed when it is
read. The name says all that its bytes follow from (`hashing.root_key`), so a file is never out of date. Its time of
change says when it was used last; when the directory is full, those go that were used the longest ago.
"""

import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gpu_worker.migration.blocks.checksum import BlockChecksum
from octavo.request.ids import BlockHash

MAGIC = b"octavo\x00\x01"
HEADER_BYTES = len(MAGIC) + 8
MOST_RUNS = 512  # of one call of the kernel, which takes 1,024
KEPT_SHARE = 0.9  # of the bytes that are allowed stays when room is made
ABANDONED_S = 600.0  # after which nobody writes a partial file any more
_NAME = re.compile("[0-9a-f]{32}")  # of a whole file
_OWN = re.compile("[0-9a-f]{32}([.]part-[0-9a-f]{8})?")  # of those that may be removed: others are somebody's
_FOLDER = re.compile("[0-9a-f]{2}")  # others, such as a file system's lost+found, are never opened


class BlockFiles:
    """The blocks of one length in a directory. Raises OSError where the disk fails."""

    def __init__(self, directory: Path, bytes_per_block: int, most_bytes: int) -> None:
        self.num_damaged = 0  # files that were removed, because they were not what was written
        self._directory = directory
        self._bytes_per_block = bytes_per_block
        self._most_bytes = most_bytes
        self._room = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.num_bytes = sum(size for _, size, _ in self._all())  # by the last count, and what was written since

    @property
    def most_blocks(self) -> int:
        """How many blocks have room here."""
        return self._most_bytes // (HEADER_BYTES + self._bytes_per_block)

    def has(self, block_hash: BlockHash) -> bool:
        return os.path.exists(self._path(block_hash))

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks are here."""
        return next((index for index, each in enumerate(hashes) if not self.has(each)), len(hashes))

    def write(self, block_hash: BlockHash, runs: Sequence[memoryview]) -> None:
        """Keeps a block, whose bytes are `runs` one after another. It may be here already."""
        path = self._path(block_hash)
        part = path.with_name(f"{path.name}.part-{secrets.token_hex(4)}")
        header = MAGIC + self._checksum(block_hash, runs)
        self._make_room(HEADER_BYTES + self._bytes_per_block)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for some in _in_turns([memoryview(header), *runs]):
                if os.writev(file, some) != sum(map(len, some)):
                    raise OSError(f"{part}: the disk has taken a part of it only")
            os.rename(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def read(self, block_hash: BlockHash, runs: Sequence[memoryview]) -> bool:
        """Fills `runs` with the block. False if it is not here, or not whole: `runs` may then hold anything."""
        path, header = self._path(block_hash), bytearray(HEADER_BYTES)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            whole = os.fstat(file).st_size == HEADER_BYTES + self._bytes_per_block and all(
                os.readv(file, some) == sum(map(len, some)) for some in _in_turns([memoryview(header), *runs])
            )
            if whole and header == MAGIC + self._checksum(block_hash, runs):
                os.utime(file)
                return True
        finally:
            os.close(file)
        self.num_damaged += 1
        path.unlink(missing_ok=True)
        return False

    def latest(self, limit: int) -> list[BlockHash]:
        """The blocks that were used last, those before others that were used before them: prefixes first."""
        whole = HEADER_BYTES + self._bytes_per_block
        found = self._all()
        ages = sorted((used, path.name) for path, size, used in found if size == whole and _NAME.fullmatch(path.name))
        return [BlockHash(bytes.fromhex(name)) for _, name in ages[len(ages) - limit if limit < len(ages) else 0 :]]

    def folders(self) -> dict[str, int]:
        """When the names in each folder have changed last, in ns."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):  # somebody has deleted the directory
            for each in os.scandir(self._directory):
                with suppress(FileNotFoundError):
                    if _FOLDER.fullmatch(each.name) and each.is_dir():
                        found[each.name] = each.stat().st_mtime_ns
        return found

    def list_folder(self, folder: str, known: Collection[BlockHash]) -> tuple[set[BlockHash], dict[BlockHash, float]]:
        """The blocks of a folder: those of `known`, and the others with when they were used."""
        still: set[BlockHash] = set()
        others: dict[BlockHash, float] = {}
        for entry in os.scandir(self._directory / folder):
            if not _NAME.fullmatch(entry.name):
                continue
            if (block_hash := BlockHash(bytes.fromhex(entry.name))) in known:
                still.add(block_hash)
                continue
            with suppress(FileNotFoundError):  # another worker has made room
                status = entry.stat()
                if status.st_size == HEADER_BYTES + self._bytes_per_block:
                    others[block_hash] = status.st_mtime
        return still, others

    def _make_room(self, num_bytes: int) -> None:
        """Removes what was used the longest ago where there is no room for so many more bytes."""
        with self._room:
            self.num_bytes += num_bytes
            if self.num_bytes <= self._most_bytes:
                return
            found = sorted(self._all(), key=lambda each: each[2])
            self.num_bytes = num_bytes + sum(size for _, size, _ in found)
            for path, size, _ in found if self.num_bytes > self._most_bytes else ():
                if self.num_bytes <= KEPT_SHARE * self._most_bytes:
                    break
                path.unlink(missing_ok=True)
                self.num_bytes -= size

    def _all(self) -> Iterator[tuple[Path, int, float]]:
        """Every file with its length, and when it was used. Partial files that nobody writes any more are removed."""
        for folder in self.folders():
            with suppress(FileNotFoundError):  # somebody has deleted the folder
                for entry in os.scandir(self._directory / folder):
                    if not _OWN.fullmatch(entry.name):
                        continue
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # another worker has made room
                        continue
                    if ".part-" in entry.name and time.time() - status.st_mtime > ABANDONED_S:
                        Path(entry.path).unlink(missing_ok=True)
                        continue
                    yield Path(entry.path), status.st_size, status.st_mtime

    def _path(self, block_hash: BlockHash) -> Path:
        return self._directory / folder_of(block_hash) / block_hash.hex()

    def _checksum(self, block_hash: BlockHash, runs: Sequence[memoryview]) -> bytes:
        """It follows from the name, too: the bytes of another block are wrong ones."""
        checksum = BlockChecksum(int.from_bytes(block_hash[:8], "little"))
        checksum.add_part(0, runs)
        return checksum.digest(self._bytes_per_block).to_bytes(8, "little")


def folder_of(block_hash: BlockHash) -> str:
    return block_hash.hex()[:2]


def _in_turns(runs: Sequence[memoryview]) -> Iterator[Sequence[memoryview]]:
    for first in range(0, len(runs), MOST_RUNS):
        yield runs[first : first + MOST_RUNS]
