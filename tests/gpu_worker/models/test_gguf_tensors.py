"""GGUF weights: number formats, and whole models through a GGUF file and back."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as theirs
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from gpu_worker.models.dequantize import PIECE_VALUES, dequantize
from gpu_worker.models.gguf_tensors import ROPE_FACTORS
from octavo.errors import BadModel
from octavo.gguf import BLOCK_SIZES, TensorType

QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *QUANTIZED])
def test_pieces_of_every_format_are_decoded_like_the_whole(name):
    """Random bytes, more than one piece of them, and a piece that is not full."""
    kind = TensorType[name]
    size, num_bytes = BLOCK_SIZES[kind]
    num_values = PIECE_VALUES + 7 * 256
    data = np.random.default_rng(5).integers(0, 256, num_values // size * num_bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):  # scales that are no numbers are among them
        expected = theirs(data, gguf.GGMLQuantizationType[name]).reshape(-1)
        values = dequantize(memoryview(data.tobytes()), kind, num_values)
    assert values.dtype == np.float32 and values.flags.writeable
    np.testing.assert_array_equal(values, expected)
    assert np.isfinite(values).mean() > 0.9


@pytest.mark.parametrize("kind", [TensorType.Q8_K, TensorType.I32])
def test_other_formats_are_refused_by_name(kind):
    size, num_bytes = BLOCK_SIZES[kind]
    with pytest.raises(BadModel, match=f"{kind.name} are not read"):
        dequantize(memoryview(bytes(num_bytes)), kind, size)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to query and key rows: row i and row i + half of a head become neighbours."""
    rows = weight.shape[0] // num_heads
    order = [h * rows + part * (rows // 2) + i for h in range(num_heads) for i in range(rows // 2) for part in (0, 1)]
    return weight[order]


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(directory: Path, path: Path, kind: str = "F32", extra: dict[str, np.ndarray] | None = None) -> None:
    """A Transformers checkpoint as llama.cpp's converter would write it."""
    config = json.loads((directory / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, weight in load_file(directory / "model.safetensors").items():
        stem, _, ending = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{NAMES[part]}.{ending}"
        else:
            part, stored = stem, f"{NAMES[stem]}.{ending}"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(part)
        if heads and arch in ("llama", "smollm3"):
            weight = interleaved(weight, config[heads])
        array = weight.float().numpy()
        quantized = kind != "F32" and array.ndim == 2
        raw = gguf.GGMLQuantizationType[kind if quantized else "F32"]
        writer.add_tensor(stored, quantize(array, raw) if quantized else array, raw_dtype=raw)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PROMPTS = [[(i * 5 + 3) % 128 for i in range(length)] for length in (30, 2)]


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen3", "smollm3"])
def test_a_model_says_the_same_from_a_gguf_file(name, tiny, load, greedy, tmp_path):
    directory, path = tiny(name).directory, tmp_path / "model.gguf"
    write_gguf(directory, path)
    if name == "qwen2":  # GGUF has no windows for it
        config = json.loads((directory / "config.json").read_text())
        plain = tmp_path / "plain"
        plain.mkdir()
        (plain / "config.json").write_text(json.dumps(config | {"use_sliding_window": False, "layer_types": None}))
        (plain / "model.safetensors").symlink_to(directory / "model.safetensors")
        directory = plain
    runner = load(path)
    assert greedy(runner, PROMPTS, 24) == greedy(load(directory), PROMPTS, 24)
    assert runner.info.eos_token_ids == (2, 5)
    assert runner.info.tokenizer == str(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_quantized_files_run(kind, tiny, load, greedy, tmp_path):
    """They give the tokens of a checkpoint with the numbers that the gguf package makes of each matrix."""
    path, plain = tmp_path / "model.gguf", tmp_path / "plain"
    write_gguf(tiny("llama").directory, path, kind)
    weights = load_file(tiny("llama").directory / "model.safetensors")
    raw = gguf.GGMLQuantizationType[kind]
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = torch.from_numpy(theirs(quantize(weight.numpy(), raw), raw).reshape(weight.shape).copy())
    plain.mkdir()
    save_file(weights, plain / "model.safetensors")
    (plain / "config.json").symlink_to(tiny("llama").directory / "config.json")
    expected = greedy(load(plain), PROMPTS, 24)
    assert greedy(load(path, quantization="none"), PROMPTS, 24) == expected
    assert kind in ("F16", "BF16", "Q8_0") or expected != greedy(load(tiny("llama").directory), PROMPTS, 24)


def test_rope_factors_divide_frequencies(tiny, load, greedy, tmp_path):
    """llama.cpp stores Llama 3's scaling so. Factors of 2 everywhere are linear scaling by 2."""
    path = tmp_path / "model.gguf"
    write_gguf(tiny("llama").directory, path, extra={ROPE_FACTORS: np.full(4, 2.0, np.float32)})
    config = json.loads((tiny("llama").directory / "config.json").read_text())
    config["rope_parameters"] = config["rope_parameters"] | {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear/config.json").write_text(json.dumps(config))
    (tmp_path / "linear/model.safetensors").symlink_to(tiny("llama").directory / "model.safetensors")
    expected = greedy(load(tmp_path / "linear"), PROMPTS, 24)
    assert greedy(load(path, quantization="none"), PROMPTS, 24) == expected
    assert greedy(load(tiny("llama").directory), PROMPTS, 24) != expected, "the factors change nothing here"
