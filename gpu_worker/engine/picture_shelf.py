"""Which encoded pictures a worker has in memory, within a bound of bytes.

A picture stays while a sequence here shows it, or waits to; of the others the one that was used longest ago goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from gpu_worker.steps.runner import EncodedPicture, PictureMemory
from octavo.pictures.picture import Picture
from octavo.pictures.support import PictureSupport
from octavo.request.errors import OutOfBlocks, TooLarge, Unimplemented


class PictureShelf:
    """Only between two steps, except for `memory`, `check_size` and `lacking`."""

    def __init__(self, memory: PictureMemory | None, max_bytes: int, in_use: Callable[[], Collection[str]]) -> None:
        """`in_use` has the digests of those that stay."""
        self._memory = memory
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._there: OrderedDict[str, int] = OrderedDict()  # bytes by digest; the one that was used last comes last
        self.num_bytes = 0
        self.num_encoded = 0

    def memory(self) -> PictureMemory:
        """Raises Unimplemented if no picture is encoded here."""
        if self._memory is None or not self._max_bytes:
            raise Unimplemented("this worker encodes no pictures: give it memory for them with --picture-cache-bytes")
        return self._memory

    def check_size(self, pictures: Sequence[Picture]) -> None:
        """Raises TooLarge for pictures of one sequence that never fit here together."""
        sizes = {each.digest: self.memory().num_bytes_of(each) for each in pictures}
        if (size := sum(sizes.values())) > self._max_bytes:
            what = f"pictures of {size} bytes do not fit {self._max_bytes}"
            raise TooLarge(f"{what}: give more with --picture-cache-bytes")

    def lacking(self, pictures: Sequence[Picture]) -> list[Picture]:
        """Those that are not there, each once."""
        return list({each.digest: each for each in pictures if each.digest not in self._there}.values())

    def has_all(self, pictures: Sequence[Picture]) -> bool:
        """Whether all are there; they count as used now."""
        if self.lacking(pictures):
            return False
        for each in pictures:
            self._there.move_to_end(each.digest)
        return True

    def support(self, of_model: PictureSupport) -> PictureSupport:
        """Which pictures this worker takes, as routers may know it."""
        try:
            self.memory()
        except Unimplemented as error:
            return of_model if of_model.refusal else replace(of_model, refusal=error.message)
        return of_model

    def require_room(self, picture: Picture) -> None:
        """Before one is encoded. Raises OutOfBlocks if those in use leave it no room."""
        if picture.digest not in self._there:
            self._idle_beside(self.memory().num_bytes_of(picture))

    def put(self, encoded: EncodedPicture) -> None:
        """Makes room for a picture and keeps it. Raises OutOfBlocks if those in use leave no room."""
        memory = self.memory()
        if encoded.digest in self._there:
            return
        missing = self.num_bytes + encoded.num_bytes - self._max_bytes
        for digest in self._idle_beside(encoded.num_bytes):
            if missing <= 0:
                break
            memory.drop(digest)
            size = self._there.pop(digest)
            self.num_bytes -= size
            missing -= size
        memory.add(encoded)
        self._there[encoded.digest] = encoded.num_bytes
        self.num_bytes += encoded.num_bytes
        self.num_encoded += 1

    def _idle_beside(self, num_bytes: int) -> list[str]:
        """What may go for a picture of so many bytes, the one first that was used longest ago."""
        used = self._in_use()
        idle = [digest for digest in self._there if digest not in used]
        if self.num_bytes + num_bytes - self._max_bytes > sum(self._there[digest] for digest in idle):
            said = f"{self.num_bytes} of {self._max_bytes} bytes for pictures are in use"
            raise OutOfBlocks(f"{said}, and this one wants {num_bytes}: place the sequence elsewhere")
        return idle
