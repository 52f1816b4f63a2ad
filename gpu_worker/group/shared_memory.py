"""Memory of all ranks of a group. It has no name: it is gone when the last of them has ended, however it ended."""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class SharedMemory:
    """Known by its descriptor. What is mapped stays when that is closed, as it is at the end of a `with`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.descriptor)

    @classmethod
    def create(cls, name: str) -> Self:
        """`name` is what the system shows of it."""
        return cls(os.memfd_create(name))

    @property
    def num_bytes(self) -> int:
        """0 until a rank has mapped it."""
        return os.fstat(self.descriptor).st_size

    def map(self, num_bytes: int) -> Tensor:
        """The memory, as bytes: zeros at the beginning. All ranks map the same size, and the first of them makes it.
        0: the size that it has.
        """
        if self.num_bytes < num_bytes:
            os.ftruncate(self.descriptor, num_bytes)
        return torch.frombuffer(mmap.mmap(self.descriptor, num_bytes or self.num_bytes), dtype=torch.uint8)


@contextmanager
def memory_of_ranks() -> Iterator[dict[str, Any]]:
    """The descriptors of what the ranks of a host share, as a RankTask has them."""
    with ExitStack() as stack:
        names = ("team", "arena", "adapters")
        yield {name: stack.enter_context(SharedMemory.create(f"octavo-{name}")).descriptor for name in names}
