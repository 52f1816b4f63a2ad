"""How many bytes of sounds this router has in memory at once, beside those that any body may have."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from octavo.request.errors import MessageTooLarge, TooManyStreams
from router.http.bodies.json_body import MAX_BODY_BYTES, announced_bytes

FILES = 4  # of the largest size, or more smaller ones
BESIDE = 64 * 1024  # bytes of a form that are not of its file
RETRY_MS = 5000


class SoundRoom:
    """Room for long sounds, each from before it arrives until it is written down."""

    def __init__(self, largest: int = MAX_BODY_BYTES) -> None:
        """`largest`: the bytes of a file at most."""
        self._largest = largest
        self._free = FILES * (largest + BESIDE)

    @contextmanager
    def taken(self, scope: Scope) -> Iterator[int]:
        """Room for a body, and how much of it; none for one that is no larger than others.

        Raises MessageTooLarge or TooManyStreams.
        """
        size = announced_bytes(scope)
        if size > self._largest + BESIDE:
            what = f"the body has {size} bytes, and a file at most {self._largest}"
            raise MessageTooLarge(f"{what}: cut the sound, make it of fewer bytes, or have sound_bytes raised")
        with self.kept(size if size > MAX_BODY_BYTES else 0) as reserved:
            yield reserved

    @contextmanager
    def kept(self, size: int) -> Iterator[int]:
        """Room for so many bytes, of a file that stays until its last part is written down. Raises TooManyStreams."""
        if size > self._free:
            raise TooManyStreams(
                "this router has as many long sounds as it has room for: retry", retry_after_ms=RETRY_MS
            )
        self._free -= size
        try:
            yield size
        finally:
            self._free += size
