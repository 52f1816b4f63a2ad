"""One good call of every CUDA op, with the names that errors use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import _C_cuda_simt as native
import numpy as np
from arrays import F16, F32, I8, I32, I64, U8, Array
from attention_cases import make_plan

from gpu_worker.sampling.filters import COLUMNS, columns_of
from octavo.request.sampling import SamplingParams

Arguments = dict[str, Any]


@dataclass
class Call:
    """`arguments` by name: an Array, or a number or text. `outputs` are written, `optional` may be left out."""

    op: str
    arguments: Arguments
    outputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    held: Any = None  # memory that is referred to
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of what is no tensor

    def __call__(self, **spoilt: Any) -> None:
        given = {name: x.ref if isinstance(x, Array) else x for name, x in self.arguments.items()} | spoilt
        made = []
        for name in signatures()[self.op]:
            known = name if name in given else ERRORS_SAY.get(name, name)
            made.append(MADE[name](given, name) if name in MADE and known not in given else given[known])
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


def cache_of(given: Arguments, name: str) -> Any:
    names = ("key_cache", "value_cache", "kv_cache_dtype", "k_scale", "v_scale")
    return native.KvCache(*(given.get(part) for part in names))


def attention_of(given: Arguments, name: str) -> Any:
    names = ("scale", "soft_cap", "window", "alibi_slopes", "sinks")
    sparse = ("blocksparse_local_blocks", "vert_stride", "blocksparse_block_size", "blocksparse_head_sliding_step")
    return native.Attention(*(given[part] for part in names), [given[part] for part in (*sparse, "tp_rank")])


def plan_of(given: Arguments, name: str) -> Any:
    return native.Plan(*(given[f"plan.{part}"] for part in ("slots", "items", "counters", "partials")))


MADE = {"kv": cache_of, "attention": attention_of, "plan": plan_of}
CALLS: dict[str, Callable[[Any], Call]] = {}
BLOCKS, HEADS, SIZE, DIM, TOKENS = 5, 2, 8, 32, 3


def of(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        CALLS[name] = lambda rng: make(rng, name)
        return make

    return keep


def floats(rng: Any, *shape: int) -> Array:
    return Array.of(rng.normal(0, 1, shape), F32)


def halves(rng: Any, *shape: int) -> Array:
    return Array.of(rng.normal(0, 1, shape), F16)


def ints(values: Any, dtype: int = I64) -> Array:
    return Array.of(np.array(values), dtype)


def int8_cache(rng: Any) -> Arguments:
    """A cache in int8 with a scale for each head, so that every part of a cache is there."""
    keys, values = (Array.of(rng.integers(-99, 99, (BLOCKS, HEADS, SIZE, DIM)), I8) for _ in range(2))
    scales = {name: Array.of(rng.uniform(0.1, 0.2, HEADS), F32) for name in ("k_scale", "v_scale")}
    return {"key_cache": keys, "value_cache": values, "kv_cache_dtype": "int8", **scales}


SCALES = ("k_scale", "v_scale")


@of("cache_write")
def cache_write(rng: Any, op: str) -> Call:
    given = {"key": floats(rng, TOKENS, HEADS, DIM), "value": floats(rng, TOKENS, HEADS, DIM)}
    given |= {"slot_mapping": ints([3, -1, BLOCKS * SIZE - 1])}
    return Call(op, int8_cache(rng) | given, ("key_cache", "value_cache"), SCALES)


@of("rope_cache_write")
def rope_cache_write(rng: Any, op: str) -> Call:
    call = cache_write(rng, op)
    call.arguments |= {"query": floats(rng, TOKENS, 4, DIM), "positions": ints([0, 6, 2]), "rotated": 8}
    call.arguments |= {"cos": floats(rng, 7, 4), "sin": floats(rng, 7, 4), "interleaved": False}
    call.outputs += ("query",)
    call.optional += ("positions",)
    return call


def attention_arguments(rng: Any) -> Arguments:
    given = int8_cache(rng) | {"query": floats(rng, TOKENS, 4, DIM), "out": floats(rng, TOKENS, 4, DIM)}
    given |= {"scale": 0.3, "soft_cap": 2.0, "window": 5, "alibi_slopes": floats(rng, 4), "sinks": floats(rng, 4)}
    sparse = {"blocksparse_local_blocks": 1, "vert_stride": 2, "blocksparse_block_size": 8, "tp_rank": 0}
    return given | sparse | {"blocksparse_head_sliding_step": 1}


@of("paged_attention")
def paged_attention(rng: Any, op: str) -> Call:
    given = attention_arguments(rng) | {"kernel": "simt"}
    q_lens, lens = [1, 2], [SIZE + 3, 2]
    rows, _ = native.attention_kernel("simt", F32, "int8", DIM, 4)
    packed = native.plan_attention(q_lens, lens, HEADS, 2, rows, 4, 0, 5)
    _, (slots, items, counters, partials) = make_plan(packed, rows * (DIM + 2))
    plan = {"slots": Array(slots, I32), "items": Array(items, I32), "counters": Array(counters, I32)}
    given |= {f"plan.{name}": array for name, array in plan.items()}
    given |= {"plan.partials": Array(partials, F32), "rows": rows, "cu_q": ints([0, 1, 3], I32)}
    given |= {"block_tables": ints([[0, 1, 2], [4, -7, 99]], I32), "seq_lens": ints(lens, I32)}
    written = ("out", "plan.counters", "plan.partials")
    return Call(op, given, written, (*SCALES, "alibi_slopes", "sinks"))


@of("vllm_paged_attention")
def vllm_paged_attention(rng: Any, op: str) -> Call:
    given = attention_arguments(rng) | {"block_tables": ints([[0, 1], [2, 99], [3, 4]], I32)}
    parts = {"exp_sums": (TOKENS, 4, 2), "max_logits": (TOKENS, 4, 2), "tmp_out": (TOKENS, 4, 2, DIM)}
    given |= {name: floats(rng, *shape) for name, shape in parts.items()}
    given |= {"seq_lens": ints([SIZE + 3, 2, 9], I32), "max_seq_len": 12, "partition": 8}
    return Call(op, given, ("out", *parts), (*SCALES, "alibi_slopes", "sinks"))


def arena(rng: Any) -> Array:
    return floats(rng, 2, BLOCKS, 3, 4)


@of("copy_blocks")
def copy_blocks(rng: Any, op: str) -> Call:
    given = {"source": arena(rng), "target": arena(rng), "pairs": ints([[0, 1], [2, 3]])}
    return Call(op, given, ("target",))


@of("gather_blocks")
@of("scatter_blocks")
def gather_blocks(rng: Any, op: str) -> Call:
    staging = Array.of(rng.integers(0, 255, (2, 2, 40)), U8)
    given = {"arena": arena(rng), "ids": ints([3, 0]), "staging": staging, "begin": 8}
    return Call(op, given, ("staging",) if op == "gather_blocks" else ("arena",))


@of("checksum_blocks")
def checksum_blocks(rng: Any, op: str) -> Call:
    return Call(op, {"arena": arena(rng), "ids": ints([3, 0]), "out": ints([7, 7])}, ("out",))


@of("convert_fp8")
def convert_fp8(rng: Any, op: str) -> Call:
    given = {"target": Array.of(np.zeros((3, 4)), U8), "source": floats(rng, 3, 4), "scale": 0.5, "kv_dtype": "int8"}
    return Call(op, given, ("target",))


@of("rms_norm")
def rms_norm(rng: Any, op: str) -> Call:
    given = {"out": floats(rng, TOKENS, 16), "x": floats(rng, TOKENS, 16), "weight": floats(rng, 16), "eps": 1e-5}
    return Call(op, given, ("out",))


@of("fused_add_rms_norm")
def fused_add_rms_norm(rng: Any, op: str) -> Call:
    given = {"x": floats(rng, TOKENS, 16), "residual": floats(rng, TOKENS, 16), "weight": floats(rng, 16), "eps": 1e-5}
    return Call(op, given, ("x", "residual"))


@of("silu_and_mul")
def silu_and_mul(rng: Any, op: str) -> Call:
    return Call(op, {"out": floats(rng, 3, 8), "x": floats(rng, 3, 16)}, ("out",))


@of("linear")
def linear(rng: Any, op: str) -> Call:
    given = {"out": floats(rng, TOKENS, 5), "x": floats(rng, TOKENS, 16), "weight": floats(rng, 5, 16)}
    return Call(op, given | {"bias": floats(rng, 5)}, ("out",), ("bias",))


@of("linear_packed")
def linear_packed(rng: Any, op: str) -> Call:
    given = {"out": halves(rng, TOKENS, 5), "x": halves(rng, TOKENS, 72), "bias": halves(rng, 5)}
    packed = np.zeros(2 * (512 + 128), dtype=np.uint8)  # a chunk for 64 columns, and one for the rest
    return Call(op, given | {"weight": Array(packed, U8), "format": "q4_mins"}, ("out",), ("bias",))


@of("sample")
def sample(rng: Any, op: str) -> Call:
    given = {"ids": ints([0, 0]), "logits": floats(rng, 2, 9), "top_k": ints([0, 3], I32)}
    columns = {"temperature": [0.5, 1.0], "top_p": [0.5, 1.0], "min_p": [0.0, 0.1]}
    given |= {name: Array.of(np.array(values), F32) for name, values in columns.items()}
    given["filters"] = Array.of(columns_of([SamplingParams(), SamplingParams(**dict.fromkeys(COLUMNS, 0.5))]), F32)
    return Call(op, given | {name: ints([5, 7]) for name in ("seed", "branch", "index")}, ("ids",))


@of("penalize")
def penalize(rng: Any, op: str) -> Call:
    given = {"logits": floats(rng, 2, 9), "offsets": ints([0, 2, 3], I32), "ids": ints([8, 0, 3])}
    given |= {"counts": ints([1, 0, -1], I32), "bias": floats(rng, 3)}
    rows = {name: Array.of(rng.uniform(0.5, 2, 2), F32) for name in ("repetition", "presence", "frequency")}
    return Call(op, given | rows, ("logits",), ("bias",))


@of("logprobs")
def logprobs(rng: Any, op: str) -> Call:
    given = {"chosen": floats(rng, 2), "values": floats(rng, 2, 3), "tokens": ints(np.zeros((2, 3), dtype=np.int64))}
    return Call(op, given | {"logits": floats(rng, 2, 9), "ids": ints([8, -1])}, ("chosen", "values", "tokens"))
