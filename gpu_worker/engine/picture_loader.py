"""Brings the pictures of sequences into memory beside the steps: the store has their pixels, a helper thread encodes
them, one at a time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.picture_shelf import PictureShelf
from octavo.metrics.table import ANSWER_BOUNDS
from octavo.metrics.value import Histogram
from octavo.pictures.picture import Picture, digest_pixels
from octavo.pictures.support import PictureSupport
from octavo.process.loop import shared
from octavo.request.errors import BadModel, Loading, NotFound, ServingError
from octavo.request.ids import SequenceId

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # a router waits longer than that for the answer to an admission
ReadPicture = Callable[[SequenceId, str], Awaitable[bytes]]  # Store.read_picture


class PictureLoader:
    """Lives on the event loop."""

    def __init__(self, shelf: PictureShelf, port: CommandPort, read: ReadPicture, support: PictureSupport) -> None:
        self.shelf = shelf
        self._port = port
        self._read = read
        self._support = support
        self._one = asyncio.Lock()  # an encoder's memory comes on top of that of pictures
        self._loading: dict[str, asyncio.Task[None]] = {}
        self.num_hits = 0  # pictures that were there when a sequence came
        self.num_misses = 0
        self.encode_times = Histogram(ANSWER_BOUNDS)  # in seconds

    async def bring(self, seq_id: SequenceId, pictures: Sequence[Picture], salt: str) -> None:
        """Returns when all are there. Does nothing for no picture.

        Raises NotFound if the store has not kept one, TooLarge or Unimplemented if they cannot be had here, OutOfBlocks
        if others leave them no room now, Loading if it takes long: they are encoded on, and are there later; and
        Draining if the engine has ended.
        """
        if not pictures:
            return
        self.shelf.check_size(pictures)
        self.num_hits += len({each.digest for each in pictures}) - len(self.shelf.lacking(pictures))
        try:
            async with asyncio.timeout(PATIENCE_S):
                for picture in self.shelf.lacking(pictures):
                    await shared(self._begin(seq_id, picture, salt))
        except TimeoutError:
            for picture in self.shelf.lacking(pictures):
                self._begin(seq_id, picture, salt)
            raise Loading("pictures are being encoded: place elsewhere, or retry") from None

    def _begin(self, seq_id: SequenceId, picture: Picture, salt: str) -> asyncio.Task[None]:
        digest = picture.digest
        loading = self._loading.get(digest)
        if loading is None:
            self.num_misses += 1
            loading = self._loading[digest] = asyncio.create_task(self._load(seq_id, picture, salt))
            loading.add_done_callback(lambda done: self._note_end(digest, done))
        return loading

    def _note_end(self, digest: str, done: "asyncio.Task[None]") -> None:
        del self._loading[digest]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.info("picture %s is not there: %s", digest, error)

    async def _load(self, seq_id: SequenceId, picture: Picture, salt: str) -> None:
        """Whatever goes wrong is said of the picture: a router that gets no answer would ask for ever."""
        async with self._one:
            try:
                await self._port.ask(lambda _: self.shelf.require_room(picture))
                pixels = await self._read_pixels(seq_id, picture, salt)
                began = time.monotonic()
                encoded = await asyncio.to_thread(self.shelf.memory().encode, picture, pixels)
                self.encode_times.observe(time.monotonic() - began)
                await self._port.ask(lambda _: self.shelf.put(encoded))
            except ServingError:
                raise
            except Exception as error:  # such as no memory on the device
                log.exception("picture %s cannot be encoded", picture.digest)
                raise BadModel(f"a picture cannot be encoded: {error!r}"[:500]) from error

    async def _read_pixels(self, seq_id: SequenceId, picture: Picture, salt: str) -> bytes:
        try:
            pixels = await self._read(seq_id, picture.digest)
        except ServingError as error:
            raise Loading(f"the store does not give its pictures now: {error.message}: retry") from error
        if not pixels:
            raise NotFound(f"the store has no picture {picture.digest} of it", resource="picture", name=picture.digest)
        cell = self._support.cell
        if digest_pixels(pixels, picture.rows * cell, picture.columns * cell, salt) != picture.digest:
            raise NotFound(
                f"the store has other bytes than picture {picture.digest}", resource="picture", name=picture.digest
            )
        return pixels
