"""The files of an adapter in memory, for workers that cannot read them any more.

They stay open while the adapter is there: what its folder has by now does not count, nor whether it is there. Whoever
gets them takes the digest again.
"""

import asyncio
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.model_files.lora_files import CONFIG, MAX_HEADER, WEIGHTS, files_of
from octavo.request.errors import InvalidArgument, TooLarge

GGUF = "adapter.gguf"
PIECE_BYTES = 1 << 20


class FilePiece(NamedTuple):
    """Pieces of a file come one after another, and files do."""

    name: str
    data: bytes


class AdapterFiles:
    """Open as long as this object lives. Any thread."""

    def __init__(self, source: Path) -> None:
        """Raises OSError if one of them is not there."""
        self._opened: dict[str, int] = {}
        weakref.finalize(self, _close, self._opened)
        for path in files_of(source):
            self._opened[GGUF if path.suffix == ".gguf" else path.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pieces(self) -> Iterator[FilePiece]:
        """What they have."""
        for name, file in self._opened.items():
            place = 0
            while data := os.pread(file, PIECE_BYTES, place):  # others may read at the same time
                yield FilePiece(name, data)
                place += len(data)


def _close(opened: dict[str, int]) -> None:
    for file in opened.values():
        os.close(file)


class TakenFiles:
    """Files that another worker sends, in a folder that lives as long as the context."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of the numbers."""
        self._left = max_bytes + 2 * MAX_HEADER
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-adapter-", ignore_cleanup_errors=True)

    def __enter__(self) -> "TakenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    async def write(self, pieces: AsyncIterator[FilePiece]) -> Path:
        """Returns what `read_lora` reads. Raises InvalidArgument for a name that no adapter has, and TooLarge."""
        folder, names = Path(self._folder.name), set[str]()
        async for name, data in pieces:
            if name not in (CONFIG, WEIGHTS, GGUF):
                raise InvalidArgument("name", f"{name[:60]!r} is no file of an adapter")
            self._left -= len(data)
            if self._left < 0:
                raise TooLarge("the files of the adapter are larger than those that are read here")
            names.add(name)
            await asyncio.to_thread(_append, folder / name, data)
        return folder / GGUF if GGUF in names else folder


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
