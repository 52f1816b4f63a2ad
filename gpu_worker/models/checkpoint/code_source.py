"""Checkpoints of 4- and 8-bit codes as weights: by their usual names, in float32 or as blocks that kernels multiply.

A matrix `X` in codes appears as `X.weight`. What the matrices mean that were asked for last is kept: a packer asks for
the formats of a stack before it asks for its blocks.

Experts of a layer round their inputs alike, so those of one place have one format: floats if one of them is in floats.
"""

import logging
import re

from torch import Tensor

from gpu_worker.models.checkpoint.code_layouts import CodeLayout
from gpu_worker.models.checkpoint.codes import Meaning
from gpu_worker.models.checkpoint.weights import FLOATS, WeightSource
from octavo.request.errors import BadModel

log = logging.getLogger(__name__)
SOME_IN_FLOATS = "other experts of the layer are floats, and all round their inputs alike"
KEPT_MEANINGS = 4  # a stack has three matrices at most
# The matrices of a layer's experts that have the same inputs, those of one that every token asks among them.
_EXPERTS = re.compile(r"(.+\.)(?:experts\.\d+|shared_\w+)\.(?:gate_proj|up_proj|w1|w3)\.weight")
_EXPERTS_DOWN = re.compile(r"(.+\.)experts\.\d+\.(down_proj|w2)\.weight")
# Of scales of inputs, which octavo does not round, and of the cache.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "kv_scale")


class CodeSource:
    """A BlockSource around another source, whose codes lie as the layout says."""

    def __init__(self, source: WeightSource, layout: CodeLayout) -> None:
        self._source = source
        self._layout = layout
        self._told: set[str] = set()
        self._meanings: dict[str, Meaning] = {}  # of the last few stems
        stored = source.names()
        self._stems = {f"{stem}.weight": stem for stem in self._find_stems(stored)}
        parts = {f"{stem}.{part}" for stem in self._stems.values() for part in (*layout.codes, *layout.others)}
        unused = {name for name in stored if name.rpartition(".")[2] in UNUSED}
        self._names = (stored - parts - unused) | set(self._stems)
        self._alike: dict[tuple[str, ...], list[str]] = {}  # matrices of experts that have one format, by their place
        for name in self._names:
            if place := _place_of_experts(name):
                self._alike.setdefault(place, []).append(name)
        self._formats: dict[tuple[str, ...], str] = {}

    def names(self) -> set[str]:
        return set(self._names)

    def coded_names(self) -> set[str]:
        """The matrices in codes."""
        return set(self._stems)

    def get(self, name: str) -> Tensor:
        """The tensor; one in codes in float32."""
        if name not in self._stems:
            return self._source.get(name)
        stem = self._stems[name]
        meaning = self._meaning(stem)
        return meaning.values(self._codes(stem, meaning))

    def block_format(self, name: str) -> str:
        """The format of the blocks that hold a tensor exactly; FLOATS for a tensor that is or becomes floats."""
        place = _place_of_experts(name)
        if not place:
            return self._own_format(name)
        if place not in self._formats:
            found = {self._own_format(each) for each in self._alike[place]}
            self._formats[place] = _common(found)
            if self._formats[place] == FLOATS and len(found) > 1:
                log.info("%s and others are decoded, and take the memory of floats: %s", name, SOME_IN_FLOATS)
        return self._formats[place]

    def _own_format(self, name: str) -> str:
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
        return meaning.blocks(self._codes(stem, meaning), self.block_format(name))

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


def _place_of_experts(name: str) -> tuple[str, ...]:
    """Which matrices of experts have the format of this one; empty: it is none of experts."""
    match = _EXPERTS.fullmatch(name) or _EXPERTS_DOWN.fullmatch(name)
    return match.groups() if match else ()


def _common(formats: set[str]) -> str:
    """The format of matrices that have these by themselves."""
    if formats <= {"q4", "q4_zeros"}:
        return max(formats)
    return formats.pop() if len(formats) == 1 else FLOATS
