"""gpt-oss by the names that other mixtures have: each expert's matrices and biases are parts of one stored tensor.

Stored are `gate_up_proj` [experts, hidden, 2 inner], whose gate and up are in turn, and `down_proj` [experts, inner,
hidden], with biases `…_bias`. As it is published they are in MXFP4 with rows first: `…_blocks`, uint8 [experts, rows,
blocks of a row, 16], and `…_scales`, uint8 [experts, rows, blocks of a row].
"""

import re
from typing import NamedTuple

from torch import Tensor

from gpu_worker.models.checkpoint import mxfp4
from gpu_worker.models.checkpoint.weights import FLOATS, WeightSource
from octavo.request.errors import BadModel

_STORED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
_PARTS = {"gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}, "down": {"down": slice(None)}}
_MOST_KEPT = 4  # stored tensors: blocks and scales of both matrices of a layer


class ExpertRows(NamedTuple):
    """Where a matrix or a bias of an expert lies: some of its rows in a stored tensor, without the ends of names."""

    stored: str
    expert: int
    rows: slice
    is_bias: bool


class GptOssSource:
    """A BlockSource over another source. `num_experts` is what the configuration says."""

    def __init__(self, source: WeightSource, num_experts: int) -> None:
        self._source = source
        self._places: dict[str, ExpertRows] = {}
        self._stored = source.names()
        self._num_experts = num_experts
        self._formats: dict[str, str] = {}
        self._kept: dict[str, Tensor] = {}
        for name in self._stored:
            if match := _STORED.fullmatch(name):
                self._place(match[1], match[2], match[3])

    def names(self) -> set[str]:
        return {*self._places, *(name for name in self._stored if not _STORED.fullmatch(name))}

    def get(self, name: str) -> Tensor:
        if name not in self._places:
            return self._source.get(name)
        place = self._places[name]
        if place.is_bias:
            return self._part(place, f"{place.stored}_bias")[place.rows]
        if not self._is_packed(place):
            return self._part(place, place.stored).T[place.rows].contiguous()
        values = mxfp4.decoded(*self._packed(place))
        if not bool(values.isfinite().all()):
            raise BadModel(f"tensor {place.stored!r}: a value is too large for {values.dtype}")
        return values

    def block_format(self, name: str) -> str:
        """One for all experts of a layer, whose inputs are rounded alike."""
        place = self._places.get(name)
        if place is None or place.is_bias or not self._is_packed(place):
            return FLOATS
        if place.stored not in self._formats:
            is_kept = mxfp4.is_kept(*self._checked(place.stored))
            self._formats[place.stored] = "mxfp4" if is_kept else FLOATS
        return self._formats[place.stored]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None or place.is_bias or not self._is_packed(place):
            return tuple(self.get(name).shape)
        scales = self._packed(place)[1]
        return (len(scales), scales.shape[1] * mxfp4.BLOCK)

    def blocks(self, name: str) -> Tensor:
        return mxfp4.as_blocks(*self._packed(self._places[name]))

    def _place(self, stem: str, stored: str, end: str) -> None:
        """The parts of a stored tensor, by their usual names."""
        for part, rows in _PARTS[stored].items():
            for expert in range(self._num_experts):
                is_bias = end == "_bias"
                name = f"{stem}.{expert}.{part}_proj.{'bias' if is_bias else 'weight'}"
                self._places[name] = ExpertRows(f"{stem}.{stored}_proj", expert, rows, is_bias)

    def _is_packed(self, place: ExpertRows) -> bool:
        return f"{place.stored}_blocks" in self._stored or f"{place.stored}_scales" in self._stored

    def _packed(self, place: ExpertRows) -> tuple[Tensor, Tensor]:
        self._checked(place.stored)
        blocks, scales = (self._part(place, f"{place.stored}_{end}") for end in ("blocks", "scales"))
        return blocks[place.rows], scales[place.rows]

    def _checked(self, stored: str) -> tuple[Tensor, Tensor]:
        is_new = f"{stored}_blocks" not in self._kept
        blocks, scales = self._tensor(f"{stored}_blocks"), self._tensor(f"{stored}_scales")
        if is_new:
            mxfp4.check_parts(stored, blocks, scales)
        return blocks, scales

    def _part(self, place: ExpertRows, stored: str) -> Tensor:
        tensor = self._tensor(stored)
        if len(tensor) != self._num_experts:
            raise BadModel(f"tensor {stored!r} has {len(tensor)} experts, the configuration says {self._num_experts}")
        return tensor[place.expert]

    def _tensor(self, stored: str) -> Tensor:
        if stored not in self._kept:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[stored] = self._source.get(stored)
        return self._kept[stored]
