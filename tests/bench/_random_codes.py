"""Checkpoints in codes with random numbers in the shapes of published models: AWQ, GPTQ, compressed-tensors and fp8.

Embeddings, norms and biases are those of `_random_checkpoint` in bfloat16. Matrices that have the same inputs share the
order of their columns in act-order, as a quantizer gives it to them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _random_checkpoint import SHAPES, sizes_of, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
TILE = 128  # of fp8, in both directions
DEVIATION = 0.02  # of weights, as those of `_random_checkpoint`
Parts = dict[str, Tensor]


def write_codes(form: str, shape: str, directory: Path) -> Path:
    """The folder of this shape in this form below `directory`. One that is there stays."""
    folder = directory / f"{shape}-{form}"
    if (folder / "model.safetensors").exists():
        return folder
    plain = write_checkpoint(shape, directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(plain / name, folder / name)
    parts, settings = FORMS[form]
    config = SHAPES[shape] | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(plain / "model.safetensors")
    for name, size in sizes_of(config).items():
        if "_proj.weight" in name:
            del tensors[name]
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in parts(stem, size, generator).items()}
    save_file(tensors, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").rename(folder / "model.safetensors")
    return folder


def _words(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Words of eight random codes each, which no order of the codes in them makes other ones."""
    return torch.randint(-(2**31), 2**31, size, generator=generator, dtype=torch.int64).to(torch.int32)


def _scales(size: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    spread = 2**bits / 12**0.5  # of codes that are all as likely
    return (torch.rand(size, generator=generator) + 0.5) * DEVIATION / spread


def _awq(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    rows, columns = size
    return {
        "qweight": _words((columns, rows // 8), generator),
        "qzeros": torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales((columns // GROUP, rows), 4, generator).half(),
    }


def _act_order(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    rows, columns = size
    layer, module = stem.split(".")[2], stem.rpartition(".")[2]
    inputs = {"o_proj": 1, "down_proj": 3}.get(module, 0 if "attn" in stem else 2)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(4 * int(layer) + inputs))
    return {
        "qweight": _words((columns // 8, rows), generator),
        "qzeros": torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales((columns // GROUP, rows), 4, generator).half(),
        "g_idx": (order // GROUP).to(torch.int32),
    }


def _int4(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    rows, columns = size
    return {
        "weight_packed": _words((rows, columns // 8), generator),
        "weight_scale": _scales((rows, columns // GROUP), 4, generator).bfloat16(),
        "weight_shape": torch.tensor(size),
    }


def _int8(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    codes = torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
    return {"weight": codes, "weight_scale": _scales((size[0], 1), 8, generator).bfloat16()}


def _fp8_rows(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    weight = torch.empty(size).normal_(0, 64, generator=generator).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": torch.full((size[0], 1), DEVIATION / 64, dtype=torch.bfloat16)}


def _fp8_tiles(stem: str, size: tuple[int, ...], generator: torch.Generator) -> Parts:
    weight = torch.empty(size).normal_(0, 64, generator=generator).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": torch.full([-(-n // TILE) for n in size], DEVIATION / 64)}


def _compressed(format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}}
    group |= {"input_activations": inputs and inputs | {"symmetric": True, "dynamic": True, "strategy": "token"}}
    how = {"format": format_, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **how}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
CHANNEL = {"strategy": "channel"}
CODES = {"bits": 4, "group_size": GROUP}
FORMS: dict[str, tuple[Callable[[str, tuple[int, ...], torch.Generator], Parts], dict[str, Any]]] = {
    "awq": (_awq, CODES | {"quant_method": "awq", "zero_point": True, "version": "gemm"}),
    "gptq-act-order": (_act_order, CODES | {"quant_method": "gptq", "sym": True, "desc_act": True}),
    "int4": (_int4, _compressed("pack-quantized", INT4, None)),
    "int8": (_int8, _compressed("int-quantized", INT8 | CHANNEL, INT8)),
    "fp8": (_fp8_rows, _compressed("float-quantized", FLOAT8 | CHANNEL, FLOAT8)),
    "fp8-tiles": (
        _fp8_tiles,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE], "fmt": "e4m3"},
    ),
}
