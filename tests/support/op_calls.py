"""One good call of everything the extension offers, with memory around every tensor that no op may touch."""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_worker.sampling.filters import COLUMNS

MARGIN = 64  # bytes on each side
I32, I64, U8 = torch.int32, torch.int64, torch.uint8


class Fence:
    """Makes tensors with a margin, and tells whether any byte has changed."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, its buffer, the buffer as it was

    def __call__(self, x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        buffer = torch.full((size + 2 * MARGIN,), 0xA5, dtype=U8)
        inner = buffer[MARGIN : MARGIN + size].view(x.dtype).view(x.shape)
        inner.copy_(x)
        self._held.append((inner, buffer, buffer.clone()))
        return inner

    def ints(self, *values: Any, dtype: torch.dtype = I64) -> Tensor:
        return self(torch.tensor(values, dtype=dtype))

    def is_whole(self, written: list[Tensor]) -> bool:
        """Whether nothing but `written` has changed, and that only inside."""
        places = {x.data_ptr() for x in written}
        for inner, buffer, before in self._held:
            same = buffer == before
            if inner.data_ptr() in places:
                same[MARGIN : len(same) - MARGIN] = True
            if not same.all():
                return False
        return True


@dataclass
class Call:
    """`arguments` by name; `outputs` are those that are written."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ()

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    def written(self) -> list[Tensor]:
        return [self.arguments[name] for name in self.outputs if isinstance(self.arguments[name], Tensor)]


def signatures(module: ModuleType) -> dict[str, str]:
    """What the module offers that takes tensors, or lists and dicts of them: `op`, `Class`, `Class.method`."""
    found = {}
    for name, thing in vars(module).items():
        if isinstance(thing, type) and not issubclass(thing, BaseException):
            found[name] = thing.__init__.__doc__
            methods = {key: each for key, each in vars(thing).items() if not key.startswith("_") and callable(each)}
            found |= {f"{name}.{key}": method.__doc__ for key, method in methods.items()}
        elif callable(thing) and not isinstance(thing, type):
            found[name] = thing.__doc__
    return {name: text for name, text in found.items() if re.search(r": (torch\.Tensor|list|dict)\b", text or "")}


CALLS: dict[str, Callable[[ModuleType, Fence, int], Call]] = {}


def good_call(module: ModuleType, name: str, fence: Fence, n: int = 2) -> Call:
    """A call with n tokens, rows, sequences or blocks."""
    assert name in CALLS, f"op_calls.py has no call of {name}: add one, and it is tested with what it must refuse"
    return CALLS[name](module, fence, n)


def of(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        CALLS[name] = make
        return make

    return keep


def rows_of(module: ModuleType, name: str, fence: Fence, n: int, **more: Any) -> Call:
    return Call(
        getattr(module, name), {"out": fence(torch.empty(n, 8)), "x": fence(torch.randn(n, 8)), **more}, ("out",)
    )


@of("rms_norm")
def rms_norm(module, fence, n):
    return rows_of(module, "rms_norm", fence, n, weight=fence(torch.randn(8)), eps=1e-5)


@of("silu_and_mul")
def silu_and_mul(module, fence, n):
    return rows_of(module, "silu_and_mul", fence, n, x=fence(torch.randn(n, 16)))


@of("linear_recurrence")
def linear_recurrence(module, fence, n):
    given = {name: fence(torch.rand(n, heads, 3)) for name, heads in (("queries", 1), ("keys", 1), ("decays", 2))}
    given |= {"values": fence(torch.rand(n, 2, 9)), "rates": fence(torch.rand(n, 2))}
    written = {"out": fence(torch.empty(n, 2, 9)), "state": fence(torch.rand(2, 3, 9))}
    return Call(module.linear_recurrence, {**written, **given}, ("out", "state"))


@of("rotary")
def rotary(module, fence, n):
    heads, angles = fence(torch.randn(n, 4, 16)), angles_of(fence, n)
    return Call(module.rotary, {"heads": heads, **angles, "interleaved": True}, ("heads",))


def angles_of(fence, n):
    tables = {"cos": fence(torch.ones(5, 4)), "sin": fence(torch.ones(5, 6))}
    return {"positions": fence.ints(*[4, 0][:n]), **tables, "rotated": 8}


def kv_of(fence):
    return fence(torch.randn(4, 2, 2, 8, 16))


@of("cache_write")
def cache_write(module, fence, n):
    keys, values = fence(torch.randn(n, 2, 16)), fence(torch.randn(n, 2, 16))
    slots = fence.ints(*[3, -1][:n])
    return Call(module.cache_write, {"kv": kv_of(fence), "keys": keys, "values": values, "slots": slots}, ("kv",))


def batch_of(fence, n):
    return {
        "cu_q": fence.ints(*range(n + 1), dtype=I32),
        "seq_lens": fence.ints(*[9, 3][:n], dtype=I32),
        "block_tables": fence(torch.tensor([[0, 1], [2, 99]], dtype=I32)[:n]),
    }


@of("paged_attention")
def paged_attention(module, fence, n):
    arguments = {"out": fence(torch.empty(n, 4, 16)), "queries": fence(torch.randn(n, 4, 16)), "kv": kv_of(fence)}
    options = {"scale": 0.3, "window": 5, "soft_cap": 2.0, "alibi": fence(torch.ones(4)), "sinks": fence(torch.ones(4))}
    options["sparse"] = [1, 2, 8, 1, 0]
    return Call(module.paged_attention, {**arguments, **batch_of(fence, n), **options}, ("out",))


def scores_of(fence, n):
    scores = {"counts": fence.ints(*[1, 2][:n], dtype=I32), "logprobs": fence(torch.empty(n))}
    return {**scores, "top_ids": fence(torch.full((n, 2), -7)), "top_logprobs": fence(torch.empty(n, 2))}


@of("sample")
def sample(module, fence, n):
    floats = {"temperature": [0.5, 0.0], "top_p": [0.5, 1.0], "min_p": [0.0, 1.0], "repetition": [1.0, 2.0]}
    lists = {"seen_ids": [3, 1], "bias_ids": [0, 3], "allowed_ids": [-1, 2]}
    arguments = {
        "ids": fence(torch.full((n,), -7)),
        "logits": fence(torch.randn(2, 5)),
        "rows": fence.ints(*[1, 0][:n]),
    }
    arguments |= {name: fence(torch.tensor(values[:n])) for name, values in floats.items()}
    arguments |= {name: fence.ints(*values[:n]) for name, values in lists.items()}
    arguments |= {name: fence(torch.randn(n)) for name in ("seen_costs", "biases")}
    arguments |= {name: fence.ints(*range(n + 1)) for name in ("seen_ends", "bias_ends", "allowed_ends")}
    arguments |= {"rows": fence.ints(*[1, 0][:n])}
    arguments["filters"] = fence(torch.full((n, len(COLUMNS)), 0.5))
    arguments |= {name: fence.ints(*[5, 7][:n]) for name in ("seed", "branch", "index")}
    arguments |= {"mask_of": fence.ints(*[0, -1][:n], dtype=I32), "masks": fence(torch.tensor([[0b10111]], dtype=I32))}
    arguments |= {"top_k": fence.ints(*[0, 3][:n], dtype=I32), **scores_of(fence, n)}
    return Call(module.sample, arguments, ("ids", "logprobs", "top_ids", "top_logprobs"))


@of("score")
def score(module, fence, n):
    arguments = {"logits": fence(torch.randn(n, 5)), "targets": fence.ints(*[4, 0][:n])}
    return Call(module.score, arguments | scores_of(fence, n), ("logprobs", "top_ids", "top_logprobs"))


def arena_of(fence):
    return fence(torch.randn(2, 4, 3, 2))


@of("copy_blocks")
def copy_blocks(module, fence, n):
    pairs = fence(torch.tensor([[0, 1], [2, 3]])[:n])
    return Call(module.copy_blocks, {"source": arena_of(fence), "target": arena_of(fence), "pairs": pairs}, ("target",))


@of("gather_blocks")
def gather_blocks(module, fence, n, name="gather_blocks", outputs=("staging",)):
    staging, ids = fence(torch.randn(n, 2, 5)), fence.ints(*[3, 0][:n])
    arguments = {"staging": staging, "arena": arena_of(fence), "ids": ids, "begin": 4}
    return Call(getattr(module, name), arguments, outputs)


@of("scatter_blocks")
def scatter_blocks(module, fence, n):
    return gather_blocks(module, fence, n, "scatter_blocks", ("arena",))


@of("checksum_blocks")
def checksum_blocks(module, fence, n):
    arguments = {"sums": fence(torch.empty(n, dtype=I64)), "arena": arena_of(fence), "ids": fence.ints(*[3, 0][:n])}
    return Call(module.checksum_blocks, arguments, ("sums",))


@of("populate_blocks")
def populate_blocks(module, fence, n):
    return Call(module.populate_blocks, {"arena": arena_of(fence), "first": 1, "end": 4}, ("arena",))


@of("KvCache")
def kv_cache(module, fence, n):
    arguments = {
        "keys": fence(torch.zeros(4, 2, 1, 8, 16, dtype=U8)),
        "values": fence(torch.zeros(4, 2, 16, 8, dtype=U8)),
    }
    scales = {"key_scale": fence(torch.ones(2)), "value_scale": fence(torch.ones(1))}
    return Call(module.KvCache, {**arguments, "type": "fp8", **scales})


@of("quantize")
def quantize(module, fence, n):
    packed = fence(torch.empty(module.packed_bytes("q8", 3, 32), dtype=U8))
    return Call(module.quantize, {"packed": packed, "values": fence(torch.randn(3, 32)), "format": "q8"}, ("packed",))


@of("pack")
def pack(module, fence, n):
    packed = fence(torch.zeros(module.packed_bytes("halves", 3, 32), dtype=U8))
    return Call(module.pack, {"packed": packed, "values": fence(torch.randn(3, 32).bfloat16())}, ("packed",))


@of("repack")
def repack(module, fence, n):
    packed = fence(torch.empty(module.packed_bytes("q4", 3, 32), dtype=U8))
    gguf = fence(torch.randint(0, 100, (3, 18), dtype=U8))
    return Call(module.repack, {"packed": packed, "gguf": gguf, "format": "q4", "rows": 3, "cols": 32}, ("packed",))


@of("Weight")
def weight(module, fence, n, rows=8, cols=32):
    data = fence(torch.randn(rows, cols))
    return Call(module.Weight, {"data": data, "format": "f32", "rows": rows, "cols": cols, "inputs": "float32"})


@of("linear")
def linear(module, fence, n):
    arguments = {"out": fence(torch.empty(n, 8)), "x": fence(torch.randn(n, 32)), "weight": weight(module, fence, n)()}
    return Call(module.linear, {**arguments, "bias": fence(torch.randn(8))}, ("out",))


@of("weight_rows")
def weight_rows(module, fence, n):
    arguments = {"out": fence(torch.empty(n, 32)), "weight": weight(module, fence, n)()}
    return Call(module.weight_rows, {**arguments, "rows": fence.ints(*[7, 0][:n])}, ("out",))


HIDDEN, INNER, VOCAB = 32, 64, 11  # two heads of 16


@of("Kv")
def kv_class(module, fence, n):
    return Call(module.Kv, {"layers": [kv_of(fence)]})


@of("Lora")
def lora(module, fence, n):
    a, b = (weight(module, fence, n, 4, HIDDEN)() for _ in range(2))
    return Call(module.Lora, {"scale": 0.5, "layers": [{"out": (a, ((b, 0),))}]})


@of("Team")
def team(module, fence, n):
    """Of one rank, in memory that begins at a line of the cache."""
    memory = fence(torch.zeros(1 << 17, dtype=torch.uint8))
    return Call(module.Team, {"memory": memory, "rank": 0, "size": 1, "patience_s": 1.0})


@of("Llama")
def llama(module, fence, n):
    def matrix(rows, cols):
        return weight(module, fence, n, rows, cols)()

    layer = {
        "input_norm": fence(torch.ones(HIDDEN)),
        "mlp_norm": fence(torch.ones(HIDDEN)),
        "qkv": (matrix(64, HIDDEN), matrix(32, HIDDEN)),
        "out": (matrix(HIDDEN, 32),),
        "gate_up": (matrix(2 * INNER, HIDDEN),),
        "down": (matrix(HIDDEN, INNER),),
        "q_norm": fence(torch.ones(16)),
        "k_norm": fence(torch.ones(16)),
        "sinks": fence(torch.ones(2)),
        "window": 4,
        "sparse": [1, 2, 8, 1, 0],
        "rotated": True,
    }
    sizes = {"vocab": VOCAB, "hidden": HIDDEN, "inner": INNER, "heads": 2, "kv_heads": 2, "head_dim": 16}
    arguments = {
        "sizes": {**sizes, "eps": 1e-5, "scale": 0.25},
        "embedding": matrix(VOCAB, HIDDEN),
        "head": matrix(VOCAB, HIDDEN),
        "norm": fence(torch.ones(HIDDEN)),
        "cos": fence(torch.ones(10, 16)),
        "sin": fence(torch.ones(10, 16)),
        "layers": [layer],
    }
    return Call(module.Llama, arguments)


@of("Llama.forward")
def llama_forward(module, fence, n):
    made = llama(module, fence, n)
    model, kv = made(), kv_of(fence)
    arguments = {
        "hidden": fence(torch.empty(n, HIDDEN)),
        "token_ids": fence.ints(*[10, 0][:n]),
        "positions": fence.ints(*[8, 2][:n]),
        "slots": fence.ints(*[8, 18][:n]),
        **batch_of(fence, n),
        "rows": fence.ints(*[0, 1][:n]),
    }
    held = made.arguments  # the extension refers to their memory

    def forward(kv, **others):
        assert held
        model.forward(**others, kv=module.Kv([kv]))

    return Call(forward, {**arguments, "kv": kv}, ("hidden", "kv"))


@of("Llama.logits")
def llama_logits(module, fence, n):
    made = llama(module, fence, n)
    model, held = made(), made.arguments

    def logits(**arguments):
        assert held
        model.logits(**arguments)

    return Call(logits, {"out": fence(torch.empty(n, VOCAB)), "hidden": fence(torch.randn(n, HIDDEN))}, ("out",))


class Streams:
    """Two ends of a stream, closed when nobody holds them any more."""

    def __init__(self) -> None:
        self.fds = [each.detach() for each in socket.socketpair()]

    def __del__(self) -> None:
        for each in self.fds:
            os.close(each)


def group_of(module, host):
    """The decoder, without layers, of the only rank of one of two hosts, the other of which nobody hears."""
    memory = torch.zeros(1 << 20, dtype=U8)
    made = module.Team(memory[-memory.data_ptr() % 64 :], 0, 1, 0.1)
    pair = Streams()
    far = pair.fds[1]
    matrix, turns, none = torch.ones(VOCAB, HIDDEN), torch.ones(10, 16), (0, 0)
    share = {
        "team": made,
        "tokens": 4,
        "plan_bytes": 4096,
        **dict.fromkeys(("kv_heads", "hidden", "inner", "layers"), none),
        "vocab": (0, VOCAB),
        "links": module.HostLinks(made, [-1, far] if host == 0 else [far, -1], host),
        **{
            f"host_{name}": [none, none]
            for name in ("kv_heads", "hidden", "inner", "expert_inner", "shared_inner", "layers")
        },
        "host_vocab": [(0, VOCAB), (0, VOCAB)],
    }
    sizes = {"vocab": VOCAB, "hidden": HIDDEN, "inner": INNER, "heads": 2, "kv_heads": 2, "head_dim": 16}
    table = module.Weight(matrix, "f32", VOCAB, HIDDEN)
    model = module.Llama(
        {**sizes, "eps": 1e-5, "scale": 0.25}, table, table, torch.ones(HIDDEN), turns, turns, [], share=share
    )
    return model, made, (pair, memory, matrix, turns)


@of("Llama.serve")
def llama_serve(module, fence, n):
    """Of a team that is broken already."""
    model, made, held = group_of(module, 1)
    made.break_off()

    def serve(arena):
        assert held
        model.serve(module.Kv([]), arena)

    return Call(serve, {"arena": fence(torch.zeros(2, 3, 8))})


@of("Llama.mirror")
def llama_mirror(module, fence, n):
    """To a host that takes what is sent, and does nothing."""
    model, _, held = group_of(module, 0)

    def mirror(**arguments):
        assert held
        model.mirror(**arguments)

    return Call(mirror, {"arena": fence(torch.zeros(2, 3, 8)), "ids": fence.ints(*[2, 0][:n])})
