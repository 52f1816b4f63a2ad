"""The files of an adapter in memory, for workers that cannot read them any more.

They stay open while the adapter is there: what its folder has by now does not count, nor whether it is there. Whoever
gets them takes the digest again.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from octavo.model_files.lora_files import CONFIG, MAX_HEADER, WEIGHTS, files_of
from octavo.request.errors import InvalidArgument, TooLarge

GGUF = "adapter.gguf"
PIECE_BYTES = 1 << 20


class FilePiece(NamedTuple):
    """Pieces of a file come one after another, and files do."""

    name: str
    data: bytes


class AdapterFiles:
    """Open until `close`. Any thread."""

    def __init__(self, source: Path) -> None:
        """Raises OSError if one of them is not there."""
        with ExitStack() as opened:
            self._files = {_name_of(path): opened.enter_context(path.open("rb")) for path in files_of(source)}
            self._opened = opened.pop_all()

    def pieces(self) -> Iterator[FilePiece]:
        """What they have. It may be read after `close`, too."""
        return _read({name: os.fdopen(os.dup(file.fileno()), "rb") for name, file in self._files.items()})

    def close(self) -> None:
        self._opened.close()


def _name_of(path: Path) -> str:
    return GGUF if path.suffix == ".gguf" else path.name


def _read(files: dict[str, BinaryIO]) -> Iterator[FilePiece]:
    with ExitStack() as opened:
        for file in files.values():
            opened.enter_context(file)
        for name, file in files.items():
            place = 0
            while data := os.pread(file.fileno(), PIECE_BYTES, place):  # copies of a descriptor share a place
                yield FilePiece(name, data)
                place += len(data)


class TakenFiles:
    """Files that another worker sends, in a folder that lives as long as the context."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of the numbers."""
        self._left = max_bytes + 2 * MAX_HEADER
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-adapter-")

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
