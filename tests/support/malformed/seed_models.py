"""Small valid models, one for each format that octavo reads: what the mutations of a malformed file begin with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 320
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "tie_word_embeddings": False,
    "eos_token_id": [257],
    "dtype": "float32",
}
GENERATION = {"eos_token_id": [257], "temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_new_tokens": 64}


def write_folder(folder: Path, *, shards: bool = False, **changes: Any) -> Path:
    """A checkpoint as folders have it, with its tokenizer. `changes` are made to config.json."""
    folder.mkdir(parents=True)
    kind = {**CONFIG, **changes}["model_type"]
    arrays = {"gpt2": _gpt_tensors, "phi3": _phi_tensors}.get(kind, _tensors)()
    tensors = {name: torch.from_numpy(values) for name, values in arrays}
    if "quantization_config" in changes:
        tensors = (_in_awq if changes["quantization_config"]["quant_method"] == "awq" else _in_fp8)(tensors)
    if shards:
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, folder / file)
        places = {name: file for file, part in parts.items() for name in part}
        _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": places})
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", CONFIG | changes)
    _write(folder / "generation_config.json", GENERATION)
    _write_tokenizer(folder)
    return folder


def write_gguf_model(path: Path, kinds: Callable[[str], str], *, sentencepiece: bool, arch: str = "llama") -> Path:
    """A GGUF file of the same sizes; `kinds` says the type of each matrix."""
    writer = gguf.GGUFWriter(path, arch)
    if arch == "granite":
        writer.add_logit_scale(2.0)
    writer.add_name("seed")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    (_describe_pieces if sentencepiece else _describe_bytes)(writer)
    writer.add_chat_template(TEMPLATE)
    for name, values in _tensors():
        kind = kinds(name) if values.ndim == 2 else "F32"
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
    rng, size = np.random.default_rng(3), HIDDEN // HEADS

    def matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.2)

    yield "model.embed_tokens.weight", matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", np.ones(HIDDEN, np.float32)
        yield f"{prefix}post_attention_layernorm.weight", np.ones(HIDDEN, np.float32)
        for part, rows in {"q": HEADS * size, "k": KV_HEADS * size, "v": KV_HEADS * size}.items():
            yield f"{prefix}self_attn.{part}_proj.weight", matrix(rows, HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", matrix(HIDDEN, HEADS * size)
        yield f"{prefix}mlp.gate_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", matrix(INNER, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", matrix(HIDDEN, INNER)
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    yield "lm_head.weight", matrix(VOCAB, HIDDEN)


def _gpt_tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(4)

    def with_bias(name: str, *shape: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield f"{name}.weight", rng.standard_normal(shape, dtype=np.float32) * np.float32(0.2)
        yield f"{name}.bias", np.zeros(shape[-1], np.float32)

    yield "transformer.wte.weight", rng.standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    yield "transformer.wpe.weight", rng.standard_normal((128, HIDDEN), dtype=np.float32)
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}."
        yield from with_bias(f"{prefix}ln_1", HIDDEN)
        yield from with_bias(f"{prefix}ln_2", HIDDEN)
        yield from with_bias(f"{prefix}attn.c_attn", HIDDEN, 3 * HIDDEN)
        yield from with_bias(f"{prefix}attn.c_proj", HIDDEN, HIDDEN)
        yield from with_bias(f"{prefix}mlp.c_fc", HIDDEN, INNER)
        yield from with_bias(f"{prefix}mlp.c_proj", INNER, HIDDEN)
    yield from with_bias("transformer.ln_f", HIDDEN)


def _phi_tensors() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Those of a Llama, with the matrices of Phi-3 joined."""
    found = dict(_tensors())
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        found[f"{attention}qkv_proj.weight"] = np.concatenate([found.pop(f"{attention}{x}_proj.weight") for x in "qkv"])
        parts = [found.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        found[f"{mlp}gate_up_proj.weight"] = np.concatenate(parts)
    yield from found.items()


def _in_awq(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of layers as random codes, in groups of 32 columns."""
    found = {}
    for name, values in tensors.items():
        if "_proj" not in name:
            found[name] = values
            continue
        stem, (rows, columns) = name.removesuffix("weight"), values.shape
        found[f"{stem}qweight"] = torch.randint(-(2**31), 2**31, (columns, rows // 8)).to(torch.int32)
        found[f"{stem}qzeros"] = torch.randint(-(2**31), 2**31, (columns // 32, rows // 8)).to(torch.int32)
        found[f"{stem}scales"] = torch.rand(columns // 32, rows).half() / 50
    return found


def _in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of the MLP in fp8, with a scale for each tile of 32 by 32."""
    scales = {}
    for name in [name for name in tensors if ".mlp." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        scales[f"{name}_scale_inv"] = torch.ones(-(-rows // 32), -(-columns // 32))
    return tensors | scales


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    for theirs, ours in parts.items():
        name = name.replace(theirs, ours)
    return name


def _describe_bytes(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary: 256 bytes, two marks, and merges of letters."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "o r", "t h", "a n"]
    words = [merge.replace(" ", "") for merge in merges]
    tokens = [*signs, *MARKS, *words]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if 256 <= i < 258 or token.startswith("<u") else 1 for i, token in enumerate(tokens)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def _describe_pieces(writer: gguf.GGUFWriter) -> None:
    """A vocabulary of sentencepiece: scores and no merges."""
    pieces = [
        ("<unk>", 2),
        ("<s>", 3),
        ("</s>", 3),
        *((f"<0x{i:02X}>", 6) for i in range(256)),
        *((m, 3) for m in MARKS),
    ]
    pieces += [(piece, 1) for piece in ("▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "w", "r", "d")]
    pieces += [(f"<unused{i}>", 5) for i in range(VOCAB - len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in pieces])
    writer.add_token_scores([-float(i) for i in range(len(pieces))])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _write_tokenizer(folder: Path) -> None:
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*signs, *MARKS, "he", "ll", "hell"])}
    made = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l"), ("he", "ll")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    made.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    _write(folder / "tokenizer_config.json", {**named, "chat_template": TEMPLATE, "model_max_length": 128})
    _write(folder / "special_tokens_map.json", named)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
