"""Brings low-rank adapters into memory beside the steps: files are read in a helper thread, one adapter at a time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from gpu_worker.engine.adapter_files import AdapterFiles, FilePiece, TakenFiles
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.command_port import CommandPort
from octavo.process.loop import shared
from octavo.request.errors import BadModel, Loading, ServingError

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # a router waits longer than that for the answer to an admission
TAKE_S = 60.0  # files that another worker sends
MAX_OPEN = 128  # adapters whose files stay open: the ones that came last


class AdapterLoader:
    """Lives on the event loop."""

    def __init__(self, shelf: AdapterShelf, port: CommandPort) -> None:
        self.shelf = shelf
        self._port = port
        self._one = asyncio.Lock()  # what is read comes on top of the memory for adapters
        self._taking = asyncio.Lock()  # one that is sent at a time
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._files: dict[str, AdapterFiles] = {}  # of adapters that are there, those that came last

    async def bring(self, digest: str, source: str) -> None:
        """Returns when the adapter is there. Does nothing for an empty digest.

        Raises NotFound, BadModel, TooLarge or Unimplemented if it cannot run here, NoAdapterRoom if others leave it no
        room now, Loading if it takes long: it is read on, and is there later; and Draining if the engine has ended.
        """
        if not digest or digest in self.shelf.digests:
            return
        loading = self._loading.get(digest)
        if loading is None:
            loading = self._loading[digest] = asyncio.create_task(self._load(digest, source))
            loading.add_done_callback(lambda _: self._loading.pop(digest))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await shared(loading)
        except TimeoutError:
            raise Loading(f"adapter {digest} is being read: place elsewhere, or retry") from None

    def files_of(self, digest: str) -> AdapterFiles | None:
        """The files of an adapter that is there; None: they are not open any more."""
        return self._files.get(digest) if digest in self.shelf.digests else None

    async def take_files(self, digest: str, pieces: AsyncIterator[FilePiece]) -> None:
        """Brings an adapter into memory whose files another worker sends. Raises as `bring` does, whatever it takes."""
        self.shelf.memory()  # before anything is read
        async with self._taking:  # what others send of the same adapter waits, and is not read then
            if digest in self.shelf.digests:
                return
            try:
                async with asyncio.timeout(TAKE_S):
                    with TakenFiles(self.shelf.max_file_bytes) as taken:
                        await self._load(digest, str(await taken.write(pieces)))
            except TimeoutError:
                raise Loading(f"adapter {digest} did not come in {TAKE_S:.0f} s") from None
            except OSError as error:
                raise BadModel(f"adapter {digest}: its files cannot be written here: {error}"[:500]) from error

    def _keep_open(self, digest: str, files: AdapterFiles | None) -> None:
        there = set(self.shelf.digests)
        kept = [(each, opened) for each, opened in self._files.items() if each in there]
        self._files = dict(kept[1 - MAX_OPEN :])
        if files is not None:
            self._files[digest] = files

    async def _load(self, digest: str, source: str) -> None:
        """Whatever goes wrong is said of the adapter: a router that gets no answer would ask for ever."""
        files: AdapterFiles | None = None
        async with self._one:
            try:
                await self._port.ask(lambda _: self.shelf.require_room(digest))
                with suppress(OSError):  # what reads them says what is wrong
                    files = await asyncio.to_thread(AdapterFiles, Path(source))
                adapter = await asyncio.to_thread(self.shelf.read, source, digest)
                await self._port.ask(lambda _: self.shelf.put(adapter))
                self._keep_open(digest, files)
            except ServingError:
                raise
            except Exception as error:  # such as no memory on the device
                log.exception("the adapter %s cannot be brought into memory", source)
                raise BadModel(f"{source}: cannot be brought into memory: {error!r}"[:500]) from error
