"""Checkpoints of 4- and 8-bit codes as weights: by their usual names, in float32 or as blocks that kernels multiply.

A matrix `X` in codes appears as `X.weight`. What the matrices mean that were asked for last is kept: a packer asks for
the formats of a stack before it asks for its blocks.
"""

import logging

from torch import Tensor

from gpu_worker.models.checkpoint.code_layouts import CodeLayout
from gpu_worker.models.checkpoint.codes import Meaning
from gpu_worker.models.checkpoint.weights import FLOATS, WeightSource
from octavo.request.errors import BadModel

log = logging.getLogger(__name__)
KEPT_MEANINGS = 4  # a stack has three matrices at most
# Of scales of inputs, which octavo does not round.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


class CodeSource:
    """A BlockSource around another source, whose codes lie as the layout says."""

    def __init__(self, source: WeightSource, layout: CodeLayout) -> None:
        self._source = source
        self._layout = layout
        self._told: set[str] = set()
        self._meanings: dict[str, Meaning] = {}  # of the last few stems
        stored = source.names()
        self._stems = {f"{stem}.weight": stem for stem in self._find_stems(stored)}
        parts = {f"{stem}.{part}" for stem in self._stems.values() for part in (*layout.codes, *layout.others, *UNUSED)}
        self._names = (stored - parts) | set(self._stems)

    def names(self) -> set[str]:
        return set(self._names)

    def get(self, name: str) -> Tensor:
        """The tensor; one in codes in float32."""
        if name not in self._stems:
            return self._source.get(name)
        stem = self._stems[name]
        meaning = self._meaning(stem)
        return meaning.values(self._codes(stem, meaning))

    def block_format(self, name: str) -> str:
        """The format of the blocks that hold a tensor exactly; FLOATS for a tensor that is or becomes floats."""
        if name not in self._stems:
            return FLOATS
        meaning = self._meaning(self._stems[name])
        obstacle = meaning.obstacle()
        if obstacle and obstacle not in self._told:
            self._told.add(obstacle)
            log.info("%s and others are decoded, and take the memory of floats: %s", name, obstacle)
        return meaning.block_format()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stems:
            return tuple(self._source.get(name).shape)
        meaning = self._meaning(self._stems[name])
        return len(meaning.scales), len(meaning.groups)

    def blocks(self, name: str) -> Tensor:
        """The rows of a tensor whose format is not FLOATS, in blocks of that: uint8 [rows, bytes of a row]."""
        stem = self._stems[name]
        meaning = self._meaning(stem)
        return meaning.blocks(self._codes(stem, meaning))

    def _find_stems(self, stored: set[str]) -> set[str]:
        """The matrices in codes. A `weight` is codes if it has a scale beside it, and is whole numbers."""
        found = set()
        for name in stored:
            stem, _, last = name.rpartition(".")
            plain = last == "weight" and f"{stem}.weight_scale" not in stored
            if stem and last in self._layout.codes and not plain:
                found.add(stem)
        return found

    def _meaning(self, stem: str) -> Meaning:
        if stem not in self._meanings:
            self._meanings[stem] = self._read_meaning(stem)
            if len(self._meanings) > KEPT_MEANINGS:
                del self._meanings[next(iter(self._meanings))]
        return self._meanings[stem]

    def _read_meaning(self, stem: str) -> Meaning:
        missing = [part for part in self._layout.needed if f"{stem}.{part}" not in self._source.names()]
        if missing:
            raise BadModel(f"the checkpoint has codes of {stem!r}, but no tensor '{stem}.{missing[0]}'")
        return self._layout.read_meaning(self._source, stem)

    def _codes(self, stem: str, meaning: Meaning) -> Tensor:
        codes = self._layout.read_codes(self._source, stem, meaning)
        if codes.shape != (len(meaning.scales), len(meaning.groups)):
            shape = len(meaning.scales), len(meaning.groups)
            raise BadModel(f"the codes of {stem!r} are {tuple(codes.shape)}, for scales of {shape}")
        return codes
