"""The matrices of a model in torch that are packed by their names, in memory or into a file."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, WeightSource
from gpu_worker.models.packed.packed_file import PackedFileWriter, Place
from gpu_worker.models.packed.packed_weights import PackedWeights, weights_of
from gpu_worker.models.packed.packing import MatrixPacker
from gpu_worker.models.packed.weight_memory import HugePageAllocator, ScratchMemory, WeightMemory


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Tensors of the source that become one matrix, one below the other. `scheme` is one of packed_weights.SCHEMES."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    scheme: str


@dataclass(frozen=True, slots=True)
class StackPacking:
    """A Packing. `scheme` is that of the model, by which inputs are rounded."""

    stacks: Mapping[str, LayerStack]
    source: WeightSource
    dtype: torch.dtype
    scheme: str
    extension: ModuleType
    on_tensor: ProgressCallback

    def key(self) -> str:
        """Changes with what a file holds of one checkpoint."""
        stacks = [[name, each.names, each.shapes, weights_of(each.scheme)] for name, each in self.stacks.items()]
        return hashlib.blake2b(json.dumps(stacks).encode(), digest_size=16).hexdigest()

    def in_memory(self) -> PackedWeights:
        packers = self._packers(HugePageAllocator())
        matrices = {name: packers[x.scheme].stack(x.names, x.shapes) for name, x in self.stacks.items()}
        return PackedWeights(matrices, self.scheme)

    def sizes(self) -> list[int]:
        packers = self._packers(ScratchMemory())
        return [packers[each.scheme].size(each.names, each.shapes) for each in self.stacks.values()]

    def into(self, file: PackedFileWriter) -> Mapping[str, Place]:
        packers = self._packers(ScratchMemory())
        return {
            name: file.add_matrix(packers[each.scheme].stack(each.names, each.shapes))
            for name, each in self.stacks.items()
        }

    def _packers(self, memory: WeightMemory) -> dict[str, MatrixPacker]:
        """By scheme."""
        checkpoint = CheckpointReader(self.source, torch.float32, self.on_tensor)
        schemes = {each.scheme for each in self.stacks.values()}
        return {
            scheme: MatrixPacker(self.extension, self.source, checkpoint, scheme, self.dtype, memory)
            for scheme in schemes
        }
