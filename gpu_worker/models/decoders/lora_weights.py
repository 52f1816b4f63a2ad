"""From the files of a low-rank adapter to its matrices, for one model."""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.gguf.recipes import halves
from gpu_worker.ops.lora import Lora, LoraPart, LoraStack
from octavo.model_files.lora_files import LoraFiles
from octavo.model_files.lora_support import LoraSupport
from octavo.model_files.lora_tensors import LoraMatrix, StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACKS = {  # the modules of each stack, in the order of its rows
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}


def load(files: LoraFiles, config: LlamaConfig) -> Lora:
    """Reads the adapter for this model. Raises BadModel if it is not one for it."""
    support_of(config).check_files(files)
    scale = files.scale or 1.0
    layers = [
        {name: stack for name in _STACKS if (stack := _stack(files, layer, name, config, scale)) is not None}
        for layer in range(config.num_layers)
    ]
    return Lora(files.digest, files.rank, scale, layers, _num_bytes(layers))


def _num_bytes(layers: list[dict[str, LoraStack]]) -> int:
    """Of what is kept, which may be more than the file has: matrices a of several types lie in float32."""
    stacks = [stack for layer in layers for stack in layer.values()]
    return sum(matrix.nbytes for stack in stacks for matrix in (stack.a, *(part.b for part in stack.parts)))


def support_of(config: LlamaConfig) -> LoraSupport:
    """Which adapters the model takes."""
    if config.latent:
        return LoraSupport(refusal="no adapters of models with latent attention (MLA) are read")
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys, values = config.qkv_rows
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (values, hidden),
        "qkv_proj": (queries + keys + values, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    sparse = config.expert_layers if config.experts is not None else ()
    return LoraSupport(
        num_layers=config.num_layers,
        shapes=shapes,
        expert_layers=tuple(layer for layer, has_experts in enumerate(sparse) if has_experts),
    )


def _first_rows(config: LlamaConfig) -> dict[str, int]:
    """The row of its stack at which a module's outputs begin, if they do not begin the stack."""
    queries, keys, _ = config.qkv_rows
    return {"k_proj": queries, "v_proj": queries + keys, "up_proj": config.intermediate_size}


def _stack(files: LoraFiles, layer: int, name: str, config: LlamaConfig, scale: float) -> LoraStack | None:
    """What a layer's stack of matrices gets, all with one scale; None: nothing."""
    a, parts = [], []
    for module in _STACKS[name]:
        if (stored := files.tensors.get(LoraMatrix(layer, module, "A"))) is None:
            continue
        down, up = _tensor(files, stored), _tensor(files, files.tensors[LoraMatrix(layer, module, "B")])
        if (own := files.scales.get((layer, module), files.scale)) != scale:
            down = down.float() * (own / scale)
        if (files.interleaved or config.pairs_rows) and module in ("q_proj", "k_proj"):
            up = halves(config.num_heads if module == "q_proj" else config.num_kv_heads)([up])
        a.append(down)
        parts.append(LoraPart(up, _first_rows(config).get(module, 0)))
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
