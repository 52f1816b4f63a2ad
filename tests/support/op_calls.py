"""One good call of everything the extension offers."""

from typing import Any

import group_op_calls  # noqa: F401  has those of groups
import program_op_calls  # noqa: F401  has those of programs of layers
import torch
from fenced_calls import (
    CALLS,
    HIDDEN,
    INNER,
    SIZES,
    U8,
    VOCAB,
    Call,
    Fence,
    Given,
    good_call,
    kv,
    of,
    sampled,
    signatures,
)
from torch import Tensor, empty, ones, rand, randn, zeros

__all__ = ["CALLS", "Fence", "good_call", "signatures"]


def arena() -> Tensor:
    return randn(2, 4, 3, 2)


of("rms_norm", "out")(lambda g: {"out": empty(g.n, 8), "x": randn(g.n, 8), "weight": randn(8), "eps": 1e-5})
of("silu_and_mul", "out")(lambda g: {"out": empty(g.n, 8), "x": randn(g.n, 16)})


@of("linear_recurrence", "out", "state")
def linear_recurrence(g):
    rows = {"queries": rand(g.n, 1, 3), "keys": rand(g.n, 1, 3), "values": rand(g.n, 2, 9), "decays": rand(g.n, 2, 3)}
    return {"out": empty(g.n, 2, 9), "state": rand(2, 3, 9), **rows, "rates": rand(g.n, 2)}


@of("rotary", "heads")
def rotary(g):
    angles = {"positions": g.longs(4, 0), "cos": ones(5, 4), "sin": ones(5, 6)}
    return {"heads": randn(g.n, 4, 16), **angles, "rotated": 8, "interleaved": True}


of("cache_write", "kv")(
    lambda g: {"kv": kv(), "keys": randn(g.n, 2, 16), "values": randn(g.n, 2, 16), "slots": g.longs(3, -1)}
)


@of("paged_attention", "out")
def paged_attention(g):
    options = {
        "scale": 0.3,
        "window": 5,
        "soft_cap": 2.0,
        "alibi": ones(4),
        "sinks": ones(4),
        "sparse": [1, 2, 8, 1, 0],
        "bias": ones(4, 5),
        "both_ways": False,
        "starts": g.ints(2, 0),
    }
    return {"out": empty(g.n, 4, 16), "queries": randn(g.n, 4, 16), "kv": kv(), **g.batch(), **options}


@of("sample", "ids", "logprobs", "top_ids", "top_logprobs")
def sample(g):
    given = {"ids": torch.full((g.n,), -7), "logits": randn(2, 5), **sampled(g), **g.scores()}
    return given | {"drawn": g.longs(-1, 2), "totals": g.longs(0, 1 << 41)}


of("score", "logprobs", "top_ids", "top_logprobs")(
    lambda g: {"logits": randn(g.n, 5), "targets": g.longs(4, 0), **g.scores(), "totals": g.longs(1 << 41, 0)}
)
of("copy_blocks", "target")(
    lambda g: {"source": arena(), "target": arena(), "pairs": torch.tensor([[0, 1], [2, 3]])[: g.n]}
)


@of("gather_blocks", "staging")
@of("scatter_blocks", "arena")
def gather_blocks(g):
    return {"staging": randn(g.n, 2, 5), "arena": arena(), "ids": g.longs(3, 0), "begin": 4}


of("checksum_blocks", "sums")(lambda g: {"sums": empty(g.n, dtype=torch.int64), "arena": arena(), "ids": g.longs(3, 0)})
of("populate_blocks", "arena")(lambda g: {"arena": arena(), "first": 1, "end": 4})


@of("KvCache")
def kv_cache(g):
    parts = {"keys": zeros(4, 2, 1, 8, 16, dtype=U8), "values": zeros(4, 2, 16, 8, dtype=U8)}
    return {**parts, "type": "fp8", "key_scale": ones(2), "value_scale": ones(1)}


of("quantize", "packed")(lambda g: {"packed": g.packed("q8"), "values": randn(3, 32), "format": "q8"})
of("pack", "packed")(lambda g: {"packed": g.packed("halves"), "values": randn(3, 32).bfloat16()})


@of("repack", "packed")
def repack(g):
    gguf = torch.randint(0, 100, (3, 18), dtype=U8)
    return {"packed": g.packed("q4"), "gguf": gguf, "format": "q4", "rows": 3, "cols": 32}


of("Weight")(lambda g: {"data": randn(8, 32), "format": "f32", "rows": 8, "cols": 32, "inputs": "float32"})
of("linear", "out")(lambda g: {"out": empty(g.n, 8), "x": randn(g.n, 32), "weight": g.matrix(8, 32), "bias": randn(8)})
of("weight_rows", "out")(lambda g: {"out": empty(g.n, 32), "weight": g.matrix(8, 32), "rows": g.longs(7, 0)})
of("Kv")(lambda g: {"layers": [kv()]})
of("Lora")(lambda g: {"scale": 0.5, "layers": [{"out": (g.matrix(4, HIDDEN), ((g.matrix(4, HIDDEN), 0),))}]})
of("LoraRoom")(lambda g: {"memory": zeros(1 << 14, dtype=U8)})
# Of one rank, in memory that begins at a line of the cache.
of("Team")(lambda g: {"memory": zeros(1 << 17, dtype=U8), "rank": 0, "size": 1, "patience_s": 1.0})


@of("Llama")
def llama(g):
    norms = {"input_norm": ones(HIDDEN), "mlp_norm": ones(HIDDEN), "q_norm": ones(16), "k_norm": ones(16)}
    stacks = {"qkv": (64, 32), "out": (HIDDEN,), "gate_up": (2 * INNER,)}
    layer = norms | {name: tuple(g.matrix(rows, HIDDEN) for rows in each) for name, each in stacks.items()}
    layer |= {"down": (g.matrix(HIDDEN, INNER),), "sinks": ones(2), "window": 4, "sparse": [1, 2, 8, 1, 0]}
    matrices = {name: g.matrix(VOCAB, HIDDEN) for name in ("embedding", "head")}
    turns = {"cos": ones(10, 16), "sin": ones(10, 16)}
    return {"sizes": dict(SIZES), **matrices, "norm": ones(HIDDEN), **turns, "layers": [layer | {"rotated": True}]}


def made_llama(g: Given) -> tuple[Any, Call]:
    made = CALLS["Llama"](g)
    return made(), made


@of("Llama.forward", "hidden", "kv")
def llama_forward(g):
    model, held = made_llama(g)
    places = {"token_ids": g.longs(10, 0), "positions": g.longs(8, 2), "slots": g.longs(8, 18), "rows": g.longs(0, 1)}

    def forward(kv, **others):
        model.forward(**others, kv=g.module.Kv([kv]))

    return Call(forward, {"hidden": empty(g.n, HIDDEN), **places, **g.batch(), "kv": kv()}, held=held)


@of("Llama.logits", "out")
def llama_logits(g):
    model, held = made_llama(g)
    return Call(model.logits, {"out": empty(g.n, VOCAB), "hidden": randn(g.n, HIDDEN)}, held=held)
