"""`--quantization kept`: what is kept for the CUDA kernels means, to the bit, what decoding at load makes of it.

tests/csrc/simt_cases/linear_cases.py multiplies with such matrices; here they are read number by number, as
csrc/cuda/linear_weights.cuh says that they lie.
"""

import json
import shutil
from types import ModuleType

import numpy as np
import pytest
import torch
from gguf_models import write_gguf
from safetensors.torch import load_file, save_file

from gpu_worker.models.loader import load_model
from gpu_worker.ops.cuda_weights import CudaMatrix
from gpu_worker.ops.native_cuda import NativeCudaOps
from octavo.request.errors import InvalidArgument

CPU = torch.device("cpu")
NUMBERS, SCALES = {"q4": 512, "q4_mins": 512, "e4m3": 1024}, {"q4": 64, "q4_mins": 128, "e4m3": 64}


def decoded(matrix: CudaMatrix) -> torch.Tensor:
    """In float32, lane by lane."""
    kind, chunks = matrix.format, -(-matrix.columns // 64)
    size = NUMBERS[kind] + SCALES[kind]
    data = matrix.data.numpy().reshape(-1, chunks, size)
    values = np.zeros((len(data) * 16, chunks * 64), dtype=np.float32)
    for group, chunk, k, lane, i in np.ndindex(len(data), chunks, 4, 32, 8):
        numbers, scales = np.split(data[group, chunk], [NUMBERS[kind]])
        row, column = lane // 4 + 8 * (i // 2 % 2), 16 * k + 2 * (lane % 4) + 8 * (i // 4) + i % 2
        if kind == "e4m3":
            byte = numbers[(32 * k + lane) * 8 + i : (32 * k + lane) * 8 + i + 1]
            value = torch.from_numpy(byte.copy()).view(torch.float8_e4m3fn).float().item()
            value = np.float32(value) * scales.view(np.float32)[row]
        else:
            word = int(numbers.view(np.uint32)[32 * k + lane])
            nibble, halves = word >> 4 * (i // 2 + 4 * (i % 2)) & 15, scales.view(np.float16).astype(np.float32)
            scale = halves[k // 2 * 16 + row]
            value = scale * (nibble - 8) if kind == "q4" else scale * nibble + halves[32 + k // 2 * 16 + row]
        values[16 * group + row, 64 * chunk + column] = value
    return torch.from_numpy(values)[: matrix.rows, : matrix.columns]


def loaded(path, quantization, **options):
    ops = NativeCudaOps(ModuleType("none"), CPU)
    options = {"dtype": torch.bfloat16, "ops": ops, **options}
    return load_model(str(path), device=CPU, quantization=quantization, **options).decoder


def compare(path, formats):
    kept, plain = loaded(path, "kept"), loaded(path, "auto")
    assert kept.formats == formats and not plain.formats
    matrices = 0
    for mine, other in zip(kept._layers, plain._layers, strict=True):
        for name, tensor in mine.items():
            if isinstance(tensor, CudaMatrix):
                matrices += 1
                tensor = decoded(tensor).to(torch.bfloat16)
            assert torch.equal(tensor, other[name]), name
    assert torch.equal(kept._embedding, plain._embedding) and torch.equal(kept._head, plain._head)
    return matrices


@pytest.mark.parametrize(("kind", "format_"), [("Q4_0", "q4"), ("Q4_1", "q4_mins"), ("TQ2_0", "q4")])
def test_a_gguf_file(kind, format_, tiny, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(tiny("llama-wide").directory, path, kind)
    assert compare(path, [format_]) >= 4


def test_matrices_of_several_types_are_decoded(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    kinds = {"k_proj": "Q4_1", "down_proj": "Q8_0", "embed_tokens": "Q4_0"}
    write_gguf(tiny("llama-wide").directory, path, lambda tensor: kinds.get(tensor.split(".")[-2], "Q4_0"))
    layers = loaded(path, "kept")._layers
    assert {name for name, tensor in layers[0].items() if isinstance(tensor, CudaMatrix)} == {"out", "gate_up"}
    compare(path, ["q4"])


@pytest.mark.parametrize("kind", ["tensor", "rows", "tiles", "narrow tiles"])
def test_an_fp8_directory(kind, tiny, tmp_path):
    source, target = tiny("llama-wide").directory, tmp_path / "fp8"
    shutil.copytree(source, target)
    width = 64 if kind == "tiles" else 24
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = tensor
        if "proj" in name:
            tiles = -(-tensor.shape[0] // 16), -(-tensor.shape[1] // width)
            shape = {"tensor": (1,), "rows": (tensor.shape[0], 1)}.get(kind, tiles)
            stored[name], stored[f"{name}_scale_inv"] = (tensor * 50).to(torch.float8_e4m3fn), torch.rand(shape) + 0.1
    save_file(stored, target / "model.safetensors")
    found = {"quant_method": "fp8"} | ({"weight_block_size": [16, width]} if "tiles" in kind else {})
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(content | {"quantization_config": found}))
    kept = compare(target, [] if kind == "narrow tiles" else ["e4m3"])
    assert (kept == 0) == (kind == "narrow tiles")


def test_what_cannot_keep_them_says_so(tiny, load):
    path = tiny("llama").directory
    with pytest.raises(InvalidArgument, match=r"^quantization: kept needs the CUDA kernels on a GPU and a Llama-like"):
        load(path, quantization="kept")
    with pytest.raises(InvalidArgument, match=r"^quantization: kept multiplies in 16 bits: say --dtype bfloat16"):
        loaded(path, "kept", dtype=torch.float32)
    with pytest.raises(InvalidArgument, match=r"^quantization: kept needs"):
        loaded(tiny("gpt2").directory, "kept")
