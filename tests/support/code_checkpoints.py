"""Writes tiny checkpoints as AWQ, GPTQ and compressed-tensors do, or in fp8, and what each stored number means.

Numbers go into words one at a time, as the descriptions of the formats have it, so that no mistake of the reader can be
here too.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which neighbour each nibble of a word holds, from the lowest
Tensors = dict[str, Tensor]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@dataclass(frozen=True)
class Form:
    """How a checkpoint is written. `group` 0: a scale for each row."""

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    reordered: bool = False
    scale_type: torch.dtype = torch.float16
    settings: dict[str, Any] = field(default_factory=dict)  # of quantization_config, beside what follows from the above
    packed: bool = True  # compressed-tensors: pack-quantized, or int-quantized
    early: bool = False  # compressed-tensors: zero points are not packed


FORMS = {
    "awq": Form("awq", group=64),
    "awq-rows": Form("awq", group=0),
    "gptq": Form("gptq", symmetric=True, group=128),
    "gptq-asymmetric": Form("gptq"),
    "gptq-v2": Form("gptq", settings={"checkpoint_format": "gptq_v2"}),
    "gptq-rows": Form("gptq", symmetric=True, group=0),
    "gptq-8": Form("gptq", bits=8, symmetric=True, group=64),
    "gptq-8-asymmetric": Form("gptq", bits=8),
    "gptq-act-order": Form("gptq", symmetric=True, reordered=True),
    "gptq-groups-of-16": Form("gptq", symmetric=True, group=16),
    "packed": Form("compressed-tensors", symmetric=True, group=128),
    "packed-bf16": Form("compressed-tensors", symmetric=True, group=64, scale_type=torch.bfloat16),
    "packed-f32": Form("compressed-tensors", symmetric=True, scale_type=torch.float32),
    "packed-asymmetric": Form("compressed-tensors", group=64),
    "packed-early": Form("compressed-tensors", early=True),
    "packed-rows": Form("compressed-tensors", group=0),
    "packed-8": Form("compressed-tensors", bits=8, symmetric=True, group=0),
    "packed-act-order": Form("compressed-tensors", reordered=True),
    "int8": Form("compressed-tensors", bits=8, symmetric=True, group=0, packed=False),
    "int8-asymmetric": Form("compressed-tensors", bits=8, group=0, packed=False),
}


def write_codes(source: Path, target: Path, form: Form, left_out: str = "") -> Tensors:
    """Writes the checkpoint of `source` in a form; what its tensors mean, by their usual names.

    The matrices of layers are in codes, unless their name has `left_out` in it.
    """
    shutil.copytree(source, target)
    meant, stored = {}, {}
    originals = load_file(source / "model.safetensors")
    for name, tensor in originals.items():
        is_matrix = "proj" in name or ".experts." in name
        if tensor.ndim != 2 or not is_matrix or (left_out and left_out in name):
            meant[name] = stored[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts, meant[name] = WRITERS[form.method](tensor.float().numpy().astype(np.float64), form, len(name))
        stored |= {
            f"{stem}.{part}": torch.from_numpy(np.ascontiguousarray(array))
            for part, array in parts.items()
            if f"{stem}.{part}" not in originals or part == "weight"
        }
        for part in ("scales", "weight_scale"):
            if f"{stem}.{part}" in stored:
                stored[f"{stem}.{part}"] = stored[f"{stem}.{part}"].to(form.scale_type)
    save_file(stored, target / "model.safetensors")
    content = json.loads((target / "config.json").read_text())
    content["quantization_config"] = quantization_config(form) | form.settings
    (target / "config.json").write_text(json.dumps(content))
    return meant


def write_fp8(
    source: Path, target: Path, tile: tuple[int, int], quantization: dict[str, Any], suffix: str = "_scale_inv"
) -> Tensors:
    """Writes the checkpoint of `source` in fp8, with a scale for each tile; what its tensors mean.

    A tile without a width has that of the matrix, and likewise without a height.
    """
    shutil.copytree(source, target)
    meant, stored = {}, {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in load_file(source / "model.safetensors").items():
        meant[name] = stored[name] = tensor
        if tensor.ndim == 2 and ("proj" in name or ".experts." in name):
            height, width = (size or whole for size, whole in zip(tile, tensor.shape, strict=True))
            grid = -(-tensor.shape[0] // height), -(-tensor.shape[1] // width)
            scale = (torch.rand(grid, generator=generator) + 0.5) / 50
            wide = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
            wide = wide[: tensor.shape[0], : tensor.shape[1]]
            stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
            stored[f"{name}{suffix}"] = scale if any(tile) else scale[0]
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
            meant[name] = stored[name].float() * wide
    save_file(stored, target / "model.safetensors")
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    return meant


def random_parts(shape: Sequence[int], seed: int, lowest: int = 1, highest: int = 254) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a matrix of each expert: [experts, columns, rows] when decoded."""
    generator = torch.Generator().manual_seed(seed)
    experts, columns, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


def put_in_mxfp4(stored: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Puts random blocks in the place of the experts of a gpt-oss, as published; the blocks and scales of each."""
    found = {}
    for seed, name in enumerate(sorted(name for name in stored if name.endswith(("gate_up_proj", "down_proj")))):
        found[name] = random_parts(tuple(stored.pop(name).shape), seed, lowest=124, highest=126)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = found[name]
    return found


def write_mxfp4(source: Path, target: Path) -> None:
    """Writes the gpt-oss of `source` as it is published, with other experts."""
    shutil.copytree(source, target)
    stored = load_file(source / "model.safetensors")
    put_in_mxfp4(stored)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"quantization_config": MXFP4}))


def quantization_config(form: Form) -> dict[str, Any]:
    group = form.group or -1
    if form.method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if form.method == "gptq":
        settings = {"quant_method": "gptq", "bits": form.bits, "group_size": group, "sym": form.symmetric}
        return settings | {"desc_act": form.reordered}
    weights = {"num_bits": form.bits, "type": "int", "symmetric": form.symmetric, "dynamic": False}
    strategy = {"strategy": "group", "group_size": form.group} if form.group else {"strategy": "channel"}
    order = {"actorder": "group" if form.reordered else None}
    inputs = None if form.packed else {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | strategy | order, "input_activations": inputs}}
    how = {"format": "pack-quantized" if form.packed else "int-quantized", "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"], **how}


def rounded(
    matrix: NDArray[np.float64], form: Form, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], Tensor]:
    """Codes [rows, columns], scales and zeros [rows, groups], the group of each column, and what they mean."""
    rows, columns = matrix.shape
    size, top = form.group or columns, (1 << form.bits) - 1
    groups = np.arange(columns) // size
    if form.reordered:
        groups = groups[np.random.default_rng(seed).permutation(columns)]
    scales, zeros = np.empty((rows, columns // size)), np.empty((rows, columns // size), np.int64)
    for group in range(columns // size):
        part = matrix[:, groups == group]
        if form.symmetric:
            scales[:, group], zeros[:, group] = np.abs(part).max(1) / (top // 2), top // 2 + 1
        else:
            scales[:, group] = (part.max(1) - part.min(1)) / top
            zeros[:, group] = np.clip(np.rint(-part.min(1) / scales[:, group]), 1, top)
    stored = torch.from_numpy(scales).to(form.scale_type)
    scales = stored.double().numpy()
    codes = np.clip(np.rint(matrix / scales[:, groups]) + zeros[:, groups], 0, top).astype(np.int64)
    exact = (codes - zeros[:, groups]) * scales[:, groups]
    return codes, scales, zeros, groups, torch.from_numpy(exact).float()


def words(numbers: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """The numbers of each row of an array, so many to a word of 32 bits, the first one lowest; zeros fill the last."""
    per_word = 32 // bits
    found = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.uint32)
    for place in range(numbers.shape[1]):
        found[:, place // per_word] |= (numbers[:, place].astype(np.uint32)) << np.uint32(place % per_word * bits)
    return found.view(np.int32)


def _awq(matrix: NDArray[np.float64], form: Form, seed: int) -> tuple[dict[str, NDArray[Any]], Tensor]:
    codes, scales, zeros, _, meant = rounded(matrix, form, seed)
    places = [first + place for first in range(0, len(matrix), 8) for place in AWQ_ORDER]
    parts = {"qweight": words(codes.T[:, places], 4), "qzeros": words(zeros.T[:, places], 4), "scales": scales.T}
    return parts, meant


def _gptq(matrix: NDArray[np.float64], form: Form, seed: int) -> tuple[dict[str, NDArray[Any]], Tensor]:
    codes, scales, zeros, groups, meant = rounded(matrix, form, seed)
    less = 0 if form.settings.get("checkpoint_format") == "gptq_v2" else 1
    parts = {
        "qweight": words(codes, form.bits).T,
        "qzeros": words(zeros.T - less, form.bits),
        "scales": scales.T,
        "g_idx": groups.astype(np.int32),
        "bias": np.zeros(len(matrix), np.float16),  # as AutoGPTQ writes it beside every matrix
    }
    return parts, meant


def _compressed(matrix: NDArray[np.float64], form: Form, seed: int) -> tuple[dict[str, NDArray[Any]], Tensor]:
    codes, scales, zeros, groups, meant = rounded(matrix, form, seed)
    signed, half = codes - (1 << form.bits - 1), 1 << form.bits - 1
    if form.packed:
        parts = {"weight_packed": words(codes, form.bits), "weight_shape": np.array(matrix.shape, np.int64)}
    else:
        parts = {"weight": signed.astype(np.int8)}
    parts["weight_scale"] = scales
    if not form.symmetric:
        as_bytes = form.early or not form.packed
        parts["weight_zero_point"] = (zeros - half).astype(np.int8) if as_bytes else words(zeros.T, form.bits).T
    if form.reordered:
        parts["weight_g_idx"] = groups.astype(np.int32)
    return parts, meant


WRITERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
