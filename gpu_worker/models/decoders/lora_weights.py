"""From the files of a low-rank adapter to its matrices, for one model."""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.ops.lora import Lora, LoraPart, LoraStack
from octavo.model_files.lora_files import LoraFiles, LoraMatrix, StoredTensor
from octavo.request.errors import BadModel

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACKS = {  # the modules of each stack, in the order of its rows
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
_MLP = (*_STACKS["gate_up"], *_STACKS["down"])
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load(files: LoraFiles, config: LlamaConfig) -> Lora:
    """Reads the adapter for this model. Raises BadModel if it is not one for it."""
    _check_places(files, config)
    shapes = _shapes(config)
    layers = [
        {name: stack for name in _STACKS if (stack := _stack(files, layer, name, shapes)) is not None}
        for layer in range(config.num_layers)
    ]
    return Lora(files.digest, files.rank, files.scale, layers, _num_bytes(layers))


def _num_bytes(layers: list[dict[str, LoraStack]]) -> int:
    """Of what is kept, which may be more than the file has: matrices a of several types lie in float32."""
    stacks = [stack for layer in layers for stack in layer.values()]
    return sum(matrix.nbytes for stack in stacks for matrix in (stack.a, *(part.b for part in stack.parts)))


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, int, int]]:
    """Outputs and inputs of each module, and the row of its stack at which the outputs begin."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys, values = config.qkv_rows
    return {
        "q_proj": (queries, hidden, 0),
        "k_proj": (keys, hidden, queries),
        "v_proj": (values, hidden, queries + keys),
        "qkv_proj": (queries + keys + values, hidden, 0),
        "o_proj": (hidden, queries, 0),
        "gate_proj": (inner, hidden, 0),
        "up_proj": (inner, hidden, inner),
        "gate_up_proj": (2 * inner, hidden, 0),
        "down_proj": (hidden, inner, 0),
    }


def _check_places(files: LoraFiles, config: LlamaConfig) -> None:
    for layer, module, _ in files.tensors:
        if layer >= config.num_layers:
            raise BadModel(f"{files.path}: it has layer {layer}, and the model {config.num_layers} layers")
        if module in _MLP and config.experts is not None and config.expert_layers[layer]:
            raise BadModel(f"{files.path}: it has {module} of layer {layer}, in whose place the model has experts")
        if any(LoraMatrix(layer, part, "A") in files.tensors for part in _PARTS.get(module, ())):
            raise BadModel(f"{files.path}: layer {layer} has {module} and parts of it")


def _stack(files: LoraFiles, layer: int, name: str, shapes: dict[str, tuple[int, int, int]]) -> LoraStack | None:
    """What a layer's stack of matrices gets; None: nothing."""
    a, parts = [], []
    for module in _STACKS[name]:
        if (down := files.tensors.get(LoraMatrix(layer, module, "A"))) is None:
            continue
        up, (rows, columns, first) = files.tensors[LoraMatrix(layer, module, "B")], shapes[module]
        if (down.shape[1], up.shape[0]) != (columns, rows):
            what = f"{module} of layer {layer} is for {down.shape[1]} inputs and {up.shape[0]} outputs"
            raise BadModel(f"{files.path}: {what}, and the model's has {columns} and {rows}")
        a.append(_tensor(files, down))
        parts.append(LoraPart(_tensor(files, up), first))
    return LoraStack(torch.cat(a), tuple(parts)) if parts else None


def _tensor(files: LoraFiles, stored: StoredTensor) -> Tensor:
    """A copy, so that the content of the whole file need not stay."""
    numbers = np.frombuffer(files.content, np.uint8, stored.num_bytes, stored.start)
    return torch.from_numpy(numbers.copy()).view(_DTYPES[stored.dtype]).view(stored.shape)


def placed(lora: Lora, dtype: torch.dtype, device: torch.device) -> Lora:
    """The adapter for a decoder in torch."""

    def moved(stack: LoraStack) -> LoraStack:
        parts = tuple(LoraPart(part.b.to(device, dtype), part.first) for part in stack.parts)
        return LoraStack(stack.a.to(device, dtype), parts)

    layers = [{name: moved(stack) for name, stack in layer.items()} for layer in lora.layers]
    return Lora(lora.digest, lora.rank, lora.scale, layers, _num_bytes(layers))
