"""Brings low-rank adapters into memory beside the steps: files are read in a helper thread, one adapter at a time."""

import asyncio
import logging

from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.command_port import CommandPort
from octavo.process.loop import shared
from octavo.request.errors import BadModel, Loading, ServingError

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # a router waits longer than that for the answer to an admission


class AdapterLoader:
    """Lives on the event loop."""

    def __init__(self, shelf: AdapterShelf, port: CommandPort) -> None:
        self.shelf = shelf
        self._port = port
        self._one = asyncio.Lock()  # what is read comes on top of the memory for adapters
        self._loading: dict[str, asyncio.Task[None]] = {}

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

    async def _load(self, digest: str, source: str) -> None:
        """Whatever goes wrong is said of the adapter: a router that gets no answer would ask for ever."""
        async with self._one:
            try:
                await self._port.ask(lambda _: self.shelf.require_room(digest))
                adapter = await asyncio.to_thread(self.shelf.read, source, digest)
                await self._port.ask(lambda _: self.shelf.put(adapter))
            except ServingError:
                raise
            except Exception as error:  # such as no memory on the device
                log.exception("the adapter %s cannot be brought into memory", source)
                raise BadModel(f"{source}: cannot be brought into memory: {error!r}"[:500]) from error
