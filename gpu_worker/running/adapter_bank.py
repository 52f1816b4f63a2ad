"""The low-rank adapters of a model runner, and which tokens of a step run with which."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from gpu_worker.models.decoders.decoder import LoadLora
from gpu_worker.ops.lora import Lora, LoraRows
from gpu_worker.steps.runner import ReadAdapter
from gpu_worker.steps.seats import Seat
from octavo.model_files.lora_files import read_lora


class AdapterBank:
    """An AdapterMemory."""

    def __init__(self, load: LoadLora, device: torch.device) -> None:
        self._load = load
        self._device = device
        self._loras: dict[int, Lora] = {}
        self._last = 0

    def read(self, source: str, digest: str, max_bytes: int) -> Lora:
        return self._load(read_lora(Path(source), digest, max_bytes))

    def add(self, adapter: ReadAdapter) -> int:
        self._last += 1
        self._loras[self._last] = cast("Lora", adapter)
        return self._last

    def drop(self, number: int) -> None:
        self._loras.pop(number, None)

    def rows_of(self, seats: Sequence[Seat], lengths: Sequence[int]) -> LoraRows | None:
        """The tokens of a step's chunks that run with adapters, by adapter. None: there are none."""
        if not any(seat.adapter for seat in seats):
            return None
        rows: dict[int, list[int]] = {}
        first = 0
        for seat, length in zip(seats, lengths, strict=True):
            if seat.adapter:
                rows.setdefault(seat.adapter, []).extend(range(first, first + length))
            first += length
        return LoraRows.of([(self._loras[number], rows[number]) for number in sorted(rows)], self._device)
