"""One good call of every CUDA op, with the names that errors use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F16, F32, I8, I32, I64, U8, Array
from attention_cases import make_plan

from gpu_worker.sampling.filters import COLUMNS, columns_of
from octavo.request.sampling import SamplingParams

Arguments = dict[str, Any]
BLOCKS, HEADS, SIZE, DIM, TOKENS = 5, 2, 8, 32, 3


@dataclass
class Call:
    """`arguments` by name: an Array, or a number or text. `outputs` are written, `optional` may be left out."""

    op: str
    arguments: Arguments
    outputs: tuple[str, ...]
    optional: tuple[str, ...]

    def __call__(self, **spoilt: Any) -> None:
        given = {name: x.ref if isinstance(x, Array) else x for name, x in self.arguments.items()} | spoilt
        made = []
        for name in signatures()[self.op]:
            known = name if name in given else ERRORS_SAY.get(name, name)
            made.append(MADE[name](given) if name in MADE and known not in given else given[known])
        getattr(native, self.op)(*made, 0)

    def tensors(self) -> dict[str, Array]:
        return {name: x for name, x in self.arguments.items() if isinstance(x, Array)}


# What arguments are called by errors, which speak as vLLM does, where their texts have other names.
ERRORS_SAY = {"keys": "key", "values": "value", "queries": "query", "slots": "slot_mapping", "tables": "block_tables"}
ERRORS_SAY |= {"lens": "seq_lens", "max_len": "max_seq_len", "type": "kv_dtype", "sums": "out"}


def signatures() -> dict[str, list[str]]:
    """The ops and the names of their arguments, as the extension's own texts have them; all end with a stream."""
    found = {}
    for name, thing in vars(native).items():
        text = (getattr(thing, "__doc__", "") or "").rstrip().rpartition("\n")[2]
        if callable(thing) and text.startswith("(") and text.endswith(", stream)"):
            found[name] = text[1:-1].split(", ")[:-1]
    return found


CACHE = ("key_cache", "value_cache", "kv_cache_dtype", "k_scale", "v_scale")
SCORING = ("scale", "soft_cap", "window", "alibi_slopes", "sinks")
SPARSE = (
    "blocksparse_local_blocks",
    "vert_stride",
    "blocksparse_block_size",
    "blocksparse_head_sliding_step",
    "tp_rank",
)
MADE: dict[str, Callable[[Arguments], Any]] = {
    "kv": lambda given: native.KvCache(*map(given.get, CACHE)),
    "attention": lambda given: native.Attention(*map(given.get, SCORING), list(map(given.get, SPARSE))),
    "plan": lambda given: native.Plan(*(given[f"plan.{part}"] for part in ("slots", "items", "counters", "partials"))),
}
CALLS: dict[str, Callable[[Any], Call]] = {}


def of(op: str, *outputs: str, optional: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """For a function that has the op's arguments."""

    def keep(make: Callable[[Any], Arguments]) -> Any:
        CALLS[op] = lambda rng: Call(op, make(rng), outputs, optional)
        return make

    return keep


def floats(rng: Any, *shape: int, dtype: int = F32) -> Array:
    return Array.of(rng.normal(0, 1, shape), dtype)


def ints(values: Any, dtype: int = I64) -> Array:
    return Array.of(np.array(values), dtype)


def int8_cache(rng: Any) -> Arguments:
    """A cache in int8 with a scale for each head, so that every part of a cache is there."""
    keys, values = (Array.of(rng.integers(-99, 99, (BLOCKS, HEADS, SIZE, DIM)), I8) for _ in range(2))
    scales = {name: Array.of(rng.uniform(0.1, 0.2, HEADS), F32) for name in ("k_scale", "v_scale")}
    return {"key_cache": keys, "value_cache": values, "kv_cache_dtype": "int8", **scales}


SCALES = ("k_scale", "v_scale")
PER_HEAD = (*SCALES, "alibi_slopes", "sinks")


@of("cache_write", "key_cache", "value_cache", optional=SCALES)
def cache_write(rng: Any) -> Arguments:
    given = {"key": floats(rng, TOKENS, HEADS, DIM), "value": floats(rng, TOKENS, HEADS, DIM)}
    return int8_cache(rng) | given | {"slot_mapping": ints([3, -1, BLOCKS * SIZE - 1])}


@of("rope_cache_write", "key_cache", "value_cache", "query", optional=(*SCALES, "positions"))
def rope_cache_write(rng: Any) -> Arguments:
    given = {"query": floats(rng, TOKENS, 4, DIM), "positions": ints([0, 6, 2]), "rotated": 8, "interleaved": False}
    return cache_write(rng) | given | {"cos": floats(rng, 7, 4), "sin": floats(rng, 7, 4)}


def attention_arguments(rng: Any) -> Arguments:
    given = int8_cache(rng) | {"query": floats(rng, TOKENS, 4, DIM), "out": floats(rng, TOKENS, 4, DIM)}
    given |= {"scale": 0.3, "soft_cap": 2.0, "window": 5, "alibi_slopes": floats(rng, 4), "sinks": floats(rng, 4)}
    return given | dict(zip(SPARSE, (1, 2, 8, 1, 0), strict=True))


@of("paged_attention", "out", "plan.counters", "plan.partials", optional=PER_HEAD)
def paged_attention(rng: Any) -> Arguments:
    q_lens, lens = [1, 2], [SIZE + 3, 2]
    rows, _ = native.attention_kernel("simt", F32, "int8", DIM, 4)
    packed = native.plan_attention(q_lens, lens, HEADS, 2, rows, 4, 0, 5)
    _, parts = make_plan(packed, rows * (DIM + 2))
    names = ("slots", I32), ("items", I32), ("counters", I32), ("partials", F32)
    given = attention_arguments(rng) | {"kernel": "simt", "rows": rows, "cu_q": ints([0, 1, 3], I32)}
    given |= {f"plan.{name}": Array(part, kind) for (name, kind), part in zip(names, parts, strict=True)}
    return given | {"block_tables": ints([[0, 1, 2], [4, -7, 99]], I32), "seq_lens": ints(lens, I32)}


@of("vllm_paged_attention", "out", "exp_sums", "max_logits", "tmp_out", optional=PER_HEAD)
def vllm_paged_attention(rng: Any) -> Arguments:
    given = attention_arguments(rng) | {"block_tables": ints([[0, 1], [2, 99], [3, 4]], I32)}
    parts = {"exp_sums": (TOKENS, 4, 2), "max_logits": (TOKENS, 4, 2), "tmp_out": (TOKENS, 4, 2, DIM)}
    given |= {name: floats(rng, *shape) for name, shape in parts.items()}
    return given | {"seq_lens": ints([SIZE + 3, 2, 9], I32), "max_seq_len": 12, "partition": 8}


def arena(rng: Any) -> Array:
    return floats(rng, 2, BLOCKS, 3, 4)


of("copy_blocks", "target")(lambda rng: {"source": arena(rng), "target": arena(rng), "pairs": ints([[0, 1], [2, 3]])})


@of("gather_blocks", "staging")
@of("scatter_blocks", "arena")
def gather_blocks(rng: Any) -> Arguments:
    staging = Array.of(rng.integers(0, 255, (2, 2, 40)), U8)
    return {"arena": arena(rng), "ids": ints([3, 0]), "staging": staging, "begin": 8}


of("checksum_blocks", "out")(lambda rng: {"arena": arena(rng), "ids": ints([3, 0]), "out": ints([7, 7])})
of("convert_fp8", "target")(
    lambda rng: {
        "target": Array.of(np.zeros((3, 4)), U8),
        "source": floats(rng, 3, 4),
        "scale": 0.5,
        "kv_dtype": "int8",
    }
)
of("rms_norm", "out")(
    lambda rng: {"out": floats(rng, TOKENS, 16), "x": floats(rng, TOKENS, 16), "weight": floats(rng, 16), "eps": 1e-5}
)
of("fused_add_rms_norm", "x", "residual")(
    lambda rng: {
        "x": floats(rng, TOKENS, 16),
        "residual": floats(rng, TOKENS, 16),
        "weight": floats(rng, 16),
        "eps": 1e-5,
    }
)
of("silu_and_mul", "out")(lambda rng: {"out": floats(rng, 3, 8), "x": floats(rng, 3, 16)})


@of("linear", "out", optional=("bias",))
def linear(rng: Any) -> Arguments:
    given = {"out": floats(rng, TOKENS, 5), "x": floats(rng, TOKENS, 16)}
    return given | {"weight": floats(rng, 5, 16), "bias": floats(rng, 5)}


@of("linear_packed", "out", optional=("bias",))
def linear_packed(rng: Any) -> Arguments:
    sizes = {"out": (TOKENS, 5), "x": (TOKENS, 72), "bias": (5,)}
    packed = np.zeros(2 * (512 + 128), dtype=np.uint8)  # a chunk for 64 columns, and one for the rest
    given = {name: floats(rng, *size, dtype=F16) for name, size in sizes.items()}
    return given | {"weight": Array(packed, U8), "format": "q4_mins"}


of("round_inputs", "out")(
    lambda rng: {
        "out": Array(np.zeros((TOKENS, 160), dtype=np.uint8), U8),
        "x": floats(rng, TOKENS, 72, dtype=F16),
        "group": 64,
        "scale": 0.0,
    }
)


@of("linear_fp8", "out", optional=("bias",))
def linear_fp8(rng: Any) -> Arguments:
    given = {"out": floats(rng, TOKENS, 5, dtype=F16), "bias": floats(rng, 5, dtype=F16)}
    given["x"] = Array(np.zeros((TOKENS, 160), dtype=np.uint8), U8)
    return given | {"weight": Array(np.zeros(2 * 1088, dtype=np.uint8), U8)}


@of("sample", "ids")
def sample(rng: Any) -> Arguments:
    given = {"ids": ints([0, 0]), "logits": floats(rng, 2, 9), "top_k": ints([0, 3], I32)}
    columns = {"temperature": [0.5, 1.0], "top_p": [0.5, 1.0], "min_p": [0.0, 0.1]}
    columns["filters"] = columns_of([SamplingParams(), SamplingParams(**dict.fromkeys(COLUMNS, 0.5))])
    given |= {name: Array.of(np.array(values), F32) for name, values in columns.items()}
    return given | {name: ints([5, 7]) for name in ("seed", "branch", "index")}


@of("penalize", "logits", optional=("bias",))
def penalize(rng: Any) -> Arguments:
    given = {"logits": floats(rng, 2, 9), "offsets": ints([0, 2, 3], I32), "ids": ints([8, 0, 3])}
    given |= {"counts": ints([1, 0, -1], I32), "bias": floats(rng, 3)}
    return given | {name: Array.of(rng.uniform(0.5, 2, 2), F32) for name in ("repetition", "presence", "frequency")}


@of("logprobs", "chosen", "values", "tokens")
def logprobs(rng: Any) -> Arguments:
    given = {"chosen": floats(rng, 2), "values": floats(rng, 2, 3), "tokens": ints(np.zeros((2, 3), dtype=np.int64))}
    return given | {"logits": floats(rng, 2, 9), "ids": ints([8, -1])}
