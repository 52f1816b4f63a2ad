"""GGUF files with random blocks in the shapes of published models, of the types that llama.cpp's Q4_K_M mixes.

All have tied embeddings. The tokenizer is the demo model's without its chat template, with as many tokens that no text
becomes as the shape's vocabulary has more.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from _random_checkpoint import SHAPES, sizes_of
from gguf_models import GEMMA2, INNER, OUTER, add_sizes, finish, random_rows

from gpu_worker.models.checkpoint.locate import demo_file

SHORT_ROWS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where a row is not a whole number of superblocks


def write_q4_k_m(shape: str, directory: Path) -> Path:
    """The file of this shape below `directory`. One that is there stays."""
    path = directory / f"{shape}-q4_k_m.gguf"
    if path.exists():
        return path
    config = SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    is_gemma = config["model_type"] == "gemma3_text"
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "gemma3" if is_gemma else config["model_type"])
    add_sizes(writer, config | {"rope_parameters": {"rope_theta": config["rope_theta"]}})
    if is_gemma:
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
    copy_tokenizer(writer, config["vocab_size"])
    for name, size in sizes_of(config).items():
        stem, _, ending = name.rpartition(".")
        _, _, layer, part = stem.split(".", 3) if stem.startswith("model.layers.") else ("", "", "", stem)
        stored = f"blk.{layer}.{(GEMMA2 if is_gemma else INNER)[part]}" if layer else OUTER[stem]
        if len(size) == 1:
            value = np.zeros if ending == "bias" else np.ones
            writer.add_tensor(f"{stored}.{ending}", value(size, np.float32))
            continue
        kind = _kind(stored, int(layer or 0), config["num_hidden_layers"])
        kind = SHORT_ROWS[kind] if size[1] % 256 else kind
        rows = random_rows(kind, *size, seed=len(name) + size[0])
        writer.add_tensor(f"{stored}.{ending}", rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    path.with_suffix(".new").rename(path)
    return path


def _kind(name: str, layer: int, layers: int) -> str:
    """The embeddings have more bits, and in half of the layers the values and the last product."""
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if name == "token_embd" or (more and name.endswith(("attn_v", "ffn_down"))) else "Q4_K"


def copy_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    fields: dict[str, Any] = {
        name: field.contents() for name, field in gguf.GGUFReader(demo_file()).fields.items() if "tokenizer." in name
    }
    tokens, types = fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type")
    spare = vocab_size - len(tokens)
    writer.add_token_list([*tokens, *(f"<spare {number}>" for number in range(spare))])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * spare])
    writer.add_tokenizer_model(fields.pop("tokenizer.ggml.model"))
    writer.add_tokenizer_pre(fields.pop("tokenizer.ggml.pre"))
    writer.add_token_merges(fields.pop("tokenizer.ggml.merges"))
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
