"""Adapters of a runner without a model: of one it knows the digest, and what a step gives depends on that."""

from pathlib import Path
from typing import NamedTuple

from gpu_worker.steps.runner import ReadAdapter
from octavo.model_files.lora_files import read_lora


class PretendedAdapter(NamedTuple):
    digest: str
    num_bytes: int


class PretendedAdapters:
    """An AdapterMemory."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._last = 0

    def read(self, source: str, digest: str, max_bytes: int) -> PretendedAdapter:
        files = read_lora(Path(source), digest, max_bytes)
        return PretendedAdapter(files.digest, files.num_bytes)

    def add(self, adapter: ReadAdapter) -> int:
        self._last += 1
        self._digests[self._last] = adapter.digest
        return self._last

    def drop(self, number: int) -> None:
        self._digests.pop(number, None)

    def root_with(self, root: bytes, number: int) -> bytes:
        """What stands for the root of a branch that runs with this adapter, which has to be there."""
        return root + self._digests[number].encode() if number else root
