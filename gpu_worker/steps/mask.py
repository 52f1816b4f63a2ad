"""Which tokens may come next in a branch with a constraint: a bit per token, the least bit of a byte first."""

from ctypes import addressof, c_char
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A row of `buffer`, which may hold all masks of a step: so a sampler takes them as they lie."""

    buffer: bytearray
    size: int  # of a row, in bytes
    row: int = 0

    @classmethod
    def of(cls, data: bytes) -> "Mask":
        """A mask that has a buffer of its own."""
        return cls(bytearray(data), len(data))

    @property
    def address(self) -> int:
        """Where the row begins, while the mask lives."""
        return addressof(c_char.from_buffer(self.buffer, self.row * self.size))

    def write(self, data: bytes) -> None:
        """Writes the bytes of the row, all of them."""
        self._view()[:] = data

    def _view(self) -> memoryview:
        return memoryview(self.buffer)[self.row * self.size : (self.row + 1) * self.size]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and bytes(self) == bytes(other)

    def __bytes__(self) -> bytes:
        return bytes(self._view())
