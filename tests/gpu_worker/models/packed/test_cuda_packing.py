"""`--quantization kept`: what is kept for the CUDA kernels means, to the bit, what decoding at load makes of it.

tests/csrc/simt_cases/linear_cases.py multiplies with such matrices; here they are read number by number, as
csrc/cuda/linear_weights.cuh says that they lie.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from code_checkpoints import write_fp8
from gguf_models import write_gguf

from gpu_worker.models.loader import load_model
from gpu_worker.ops.cuda_weights import CudaMatrix, InputRounding
from gpu_worker.ops.native_cuda import NativeCudaOps
from octavo.request.errors import InvalidArgument

CPU = torch.device("cpu")
NUMBERS, SCALES = {"q4": 512, "q4_mins": 512, "e4m3": 1024}, {"q4": 64, "q4_mins": 128, "e4m3": 64}


def decoded(matrix: CudaMatrix) -> torch.Tensor:
    """In float32, number by number of each lane."""
    kind, chunks = matrix.format, -(-matrix.columns // 64)
    data = matrix.data.numpy().reshape(-1, chunks, NUMBERS[kind] + SCALES[kind])
    numbers, scales = (np.ascontiguousarray(part) for part in np.split(data, [NUMBERS[kind]], axis=2))
    k, lane, i = np.indices((4, 32, 8))
    row, column = lane // 4 + 8 * (i // 2 % 2), 16 * k + 2 * (lane % 4) + 8 * (i // 4) + i % 2
    if kind == "e4m3":
        picked = torch.from_numpy(numbers[..., (32 * k + lane) * 8 + i]).view(torch.float8_e4m3fn)
        found = picked.float().numpy() * scales.view(np.float32)[..., row]
    else:
        nibbles = numbers.view(np.uint32)[..., 32 * k + lane] >> (4 * (i // 2 + 4 * (i % 2))).astype(np.uint32) & 15
        halves = scales.view(np.float16).astype(np.float32)
        scale, given = halves[..., k // 2 * 16 + row], nibbles.astype(np.float32)
        found = scale * (given - 8) if kind == "q4" else scale * given + halves[..., 32 + k // 2 * 16 + row]
    values = np.zeros((len(data), chunks, 16, 64), dtype=np.float32)
    values[:, :, row, column] = found
    rows = values.transpose(0, 2, 1, 3).reshape(16 * len(data), -1)
    return torch.from_numpy(rows)[: matrix.rows, : matrix.columns]


def model(path, quantization, multiplies=True, **options):
    ops = NativeCudaOps(SimpleNamespace(multiplies_fp8=lambda device: multiplies), CPU)
    options = {"dtype": torch.bfloat16, "ops": ops, **options}
    return load_model(str(path), device=CPU, quantization=quantization, **options)


def loaded(path, quantization, **options):
    return model(path, quantization, **options).decoder


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
    write_gguf(tiny("llama-wide").directory, tmp_path / "model.gguf", kind)
    assert compare(tmp_path / "model.gguf", [format_]) >= 4


def test_matrices_of_several_types_are_decoded(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    kinds = {"k_proj": "Q4_1", "down_proj": "Q8_0", "embed_tokens": "Q4_0"}
    write_gguf(tiny("llama-wide").directory, path, lambda tensor: kinds.get(tensor.split(".")[-2], "Q4_0"))
    layers = loaded(path, "kept")._layers
    assert {name for name, tensor in layers[0].items() if isinstance(tensor, CudaMatrix)} == {"out", "gate_up"}
    compare(path, ["q4"])


@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (16, 64), (16, 24)])
def test_an_fp8_directory(tile, tiny, tmp_path):
    quantization = {"quant_method": "fp8"} | ({"weight_block_size": list(tile)} if all(tile) else {})
    write_fp8(tiny("llama-wide").directory, tmp_path / "fp8", tile, quantization)
    narrow = tile == (16, 24)
    assert (compare(tmp_path / "fp8", [] if narrow else ["e4m3"]) == 0) == narrow


def test_an_fp8_directory_whose_inputs_are_rounded_is_another_model_of_the_same_weights(tiny, tmp_path):
    path, tile = tmp_path / "fp8", (16, 128)
    write_fp8(tiny("llama-wide").directory, path, tile, {"quant_method": "fp8", "weight_block_size": [*tile]})
    kept, rounded = model(path, "kept"), model(path, "kept-a8")
    assert kept.fingerprint == model(path, "auto").fingerprint != rounded.fingerprint
    assert rounded.decoder.formats == ["e4m3-a8"]
    for mine, other in zip(rounded.decoder._layers, kept.decoder._layers, strict=True):
        for name, matrix in mine.items():
            if isinstance(matrix, CudaMatrix):
                assert matrix.inputs == InputRounding(columns=128) and torch.equal(matrix.data, other[name].data)
            else:
                assert torch.equal(matrix, other[name]), name


def test_inputs_are_not_rounded_where_nobody_can_or_the_checkpoint_does_not_say_how(tiny, tmp_path):
    write_fp8(tiny("llama-wide").directory, tmp_path / "fp8", (0, 0), {"quant_method": "fp8"})
    write_gguf(tiny("llama-wide").directory, tmp_path / "model.gguf", "Q4_0")
    for path, multiplies, said in (
        (tmp_path / "fp8", False, "the kernels of this build multiply no fp8 on this GPU.*: say kept"),
        (tmp_path / "model.gguf", True, "inputs are rounded where the checkpoint is fp8.*: say kept"),
    ):
        with pytest.raises(InvalidArgument, match=f"^quantization: kept-a8: {said}"):
            model(path, "kept-a8", multiplies=multiplies)


def test_what_cannot_keep_them_says_so(tiny, load):
    llama, gpt2 = (tiny(name).directory for name in ("llama", "gpt2"))
    for how, path, options, said in (
        (load, llama, {"quantization": "kept"}, "kept needs the CUDA kernels on a GPU and a Llama-like"),
        (
            loaded,
            llama,
            {"quantization": "kept", "dtype": torch.float32},
            "kept multiplies in 16 bits: say --dtype bfl",
        ),
        (loaded, gpt2, {"quantization": "kept"}, "kept needs"),
    ):
        with pytest.raises(InvalidArgument, match=f"^quantization: {said}"):
            how(path, **options)
