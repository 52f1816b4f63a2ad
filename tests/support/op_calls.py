"""One good call of everything the extension offers, with memory around every tensor that no op may touch."""

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, empty, ones, rand, randn, zeros

from gpu_worker.sampling.filters import COLUMNS

MARGIN = 64  # bytes on each side
U8 = torch.uint8
HIDDEN, INNER, VOCAB = 32, 64, 11  # of the decoder: two heads of 16
SIZES = {"vocab": VOCAB, "hidden": HIDDEN, "inner": INNER, "heads": 2, "kv_heads": 2, "head_dim": 16}
SIZES |= {"eps": 1e-5, "scale": 0.25}


class Fence:
    """Makes tensors with a margin, and tells whether any byte has changed."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, its buffer, the buffer as it was

    def __call__(self, x: Any) -> Any:
        """A copy of the tensor, or of all that a dict or list has."""
        if isinstance(x, dict):
            return {name: self(each) for name, each in x.items()}
        if isinstance(x, list):
            return [self(each) for each in x]
        if not isinstance(x, Tensor):
            return x
        size = x.numel() * x.element_size()
        buffer = torch.full((size + 2 * MARGIN,), 0xA5, dtype=U8)
        inner = buffer[MARGIN : MARGIN + size].view(x.dtype).view(x.shape)
        inner.copy_(x)
        self._held.append((inner, buffer, buffer.clone()))
        return inner

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
    """`arguments` by name; `outputs` are those that are written. `held`: what the extension refers to."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    outputs: tuple[str, ...] = ()
    held: Any = None

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


class Given:
    """What a call is made for: the module, and n tokens, rows, sequences or blocks."""

    def __init__(self, module: ModuleType, fence: Fence, n: int) -> None:
        self.module, self.fence, self.n = module, fence, n

    def longs(self, *values: Any) -> Tensor:
        """The first n."""
        return torch.tensor(values[: self.n], dtype=torch.int64)

    def ints(self, *values: Any) -> Tensor:
        return torch.tensor(values[: self.n], dtype=torch.int32)

    def ends(self, dtype: torch.dtype) -> Tensor:
        return torch.arange(self.n + 1, dtype=dtype)

    def batch(self) -> dict[str, Tensor]:
        tables = torch.tensor([[0, 1], [2, 99]], dtype=torch.int32)[: self.n]
        return {"cu_q": self.ends(torch.int32), "seq_lens": self.ints(9, 3), "block_tables": tables}

    def scores(self) -> dict[str, Tensor]:
        tops = {"top_ids": torch.full((self.n, 2), -7), "top_logprobs": empty(self.n, 2)}
        return {"counts": self.ints(1, 2), "logprobs": empty(self.n), **tops}

    def matrix(self, rows: int, cols: int) -> Any:
        return self.module.Weight(self.fence(randn(rows, cols)), "f32", rows, cols)

    def packed(self, format_: str) -> Tensor:
        return zeros(self.module.packed_bytes(format_, 3, 32), dtype=U8)


CALLS: dict[str, Callable[[Given], Call]] = {}


def good_call(module: ModuleType, name: str, fence: Fence, n: int = 2) -> Call:
    """A call with n tokens, rows, sequences or blocks."""
    assert name in CALLS, f"op_calls.py has no call of {name}: add one, and it is tested with what it must refuse"
    return CALLS[name](Given(module, fence, n))


def of(name: str, *outputs: str) -> Callable[[Any], Any]:
    """For a function that has the arguments, or the call where more than one function takes part."""

    def keep(make: Callable[[Given], Any]) -> Any:
        def call(given: Given) -> Call:
            made = make(given)
            if isinstance(made, dict):
                made = Call(getattr(given.module, name), made)
            made.arguments, made.outputs = given.fence(made.arguments), outputs
            return made

        CALLS[name] = call
        return make

    return keep


def kv() -> Tensor:
    return randn(4, 2, 2, 8, 16)


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
    }
    return {"out": empty(g.n, 4, 16), "queries": randn(g.n, 4, 16), "kv": kv(), **g.batch(), **options}


def sampled(g):
    """What says how some branches draw, of two rows of five tokens."""
    floats = {"temperature": [0.5, 0.0], "top_p": [0.5, 1.0], "min_p": [0.0, 1.0], "repetition": [1.0, 2.0]}
    longs = {"seen_ids": (3, 1), "bias_ids": (0, 3), "allowed_ids": (-1, 2), "rows": (1, 0)}
    given = {"filters": torch.full((g.n, len(COLUMNS)), 0.5)}
    given |= {name: torch.tensor(values[: g.n]) for name, values in floats.items()}
    given |= {name: g.longs(*values) for name, values in longs.items()}
    given |= {name: g.longs(5, 7) for name in ("seed", "branch", "index")}
    given |= {name: randn(g.n) for name in ("seen_costs", "biases")}
    given |= {name: g.ends(torch.int64) for name in ("seen_ends", "bias_ends", "allowed_ends")}
    given |= {"mask_of": g.ints(0, -1), "masks": torch.tensor([[0b10111]], dtype=torch.int32)}
    return given | {"top_k": g.ints(0, 3)}


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


class Streams:
    """Two ends of a stream, closed when nobody holds them any more."""

    def __init__(self) -> None:
        self.fds = [each.detach() for each in socket.socketpair()]

    def __del__(self) -> None:
        for each in self.fds:
            os.close(each)


def hosts_of(
    module: ModuleType, team: Any, pair: Streams, host: int, layers: list[tuple[int, int]], heads: int = 0
) -> Any:
    fds = [-1, pair.fds[1]] if host == 0 else [pair.fds[1], -1]
    return module.GroupHosts(team, fds, host, [(0, heads)] * 2, layers)


def group_of(module: ModuleType, host: int) -> tuple[Any, Any, Any]:
    """The decoder, without layers, of the only rank of one of two hosts, the other of which nobody hears."""
    memory, pair, none, divided = zeros(1 << 20, dtype=U8), Streams(), (0, 0), ("kv_heads", "hidden", "inner", "layers")
    made = module.Team(memory[-memory.data_ptr() % 64 :], 0, 1, 0.1)
    hosts = hosts_of(module, made, pair, host, [none, none])
    share = {"team": made, "hosts": hosts, "tokens": 4, "plan_bytes": 4096, **dict.fromkeys(divided, none)}
    share |= {f"host_{name}": [none, none] for name in ("hidden", "inner", "expert_inner", "shared_inner")}
    share |= {"vocab": (0, VOCAB), "host_vocab": [(0, VOCAB), (0, VOCAB)]}
    matrix, turns = ones(VOCAB, HIDDEN), ones(10, 16)
    table = module.Weight(matrix, "f32", VOCAB, HIDDEN)
    model = module.Llama(SIZES, table, table, ones(HIDDEN), turns, turns, [], share=share)
    return model, made, (pair, memory, matrix, turns)


@of("Llama.serve")
def llama_serve(g):
    """Of a team that is broken already."""
    model, made, held = group_of(g.module, 1)
    made.break_off()
    return Call(lambda arena: model.serve(g.module.Kv([]), arena), {"arena": zeros(2, 3, 8)}, held=held)


@dataclass
class HostPair:
    """One of two hosts, of a team that is broken, so that none waits; what it refers to, and an order."""

    hosts: Any
    order: Any
    held: Any


def host_pair(g: Given, host: int, layers: list[tuple[int, int]], *, broken: bool = True, heads: int = 0) -> HostPair:
    memory, streams = zeros(1 << 16, dtype=U8), Streams()
    made = g.module.Team(memory[-memory.data_ptr() % 64 :], 0, 1, 0.1)
    if broken:
        made.break_off()
    order = g.module.TeamOrder(made, 4, 4096)
    return HostPair(hosts_of(g.module, made, streams, host, layers, heads), order, (memory, made, streams))


SAME, FOLLOWING = [(0, 1), (0, 1)], [(0, 1), (1, 1)]


@of("GroupHosts.mirror")
def hosts_mirror(g):
    """To a host that takes what is sent, and does nothing."""
    pair = host_pair(g, 0, SAME, broken=False, heads=2)
    return Call(pair.hosts.mirror, {"arena": zeros(2, 3, 8), "ids": g.longs(2, 0)}, held=pair)


@of("WantedLogits", "drawn", "totals")
def wanted_logits(g):
    given = {"num_rows": 2, "vocabulary": 5, "drawn": g.longs(7, 7), "totals": g.longs(7, 7), **sampled(g)}
    return given | {"counts": g.ints(2, -1), "targets": g.longs(4, 0)}


@of("GroupHosts.tell")
def hosts_tell(g):
    pair = host_pair(g, 0, SAME)
    pair.order.order_logits(1)
    return Call(lambda hidden: pair.hosts.tell(pair.order, hidden), {"hidden": randn(1 + g.n, HIDDEN)}, held=pair)


@of("GroupHosts.hear")
def hosts_hear(g):
    pair = host_pair(g, 1, SAME)
    given = {"hidden": randn(64, HIDDEN), "arena": zeros(2, 3, 8)}
    return Call(lambda hidden, arena: pair.hosts.hear(pair.order, hidden, arena), given, held=pair)


@of("GroupHosts.exchange", "columns")
def hosts_exchange(g):
    pair = host_pair(g, 0, SAME)
    spans = {"spans": [(0, 20), (20, HIDDEN - 20)]}
    return Call(pair.hosts.exchange, {"columns": randn(1 + g.n, HIDDEN), **spans}, held=pair)


@of("GroupHosts.collect", "columns")
def hosts_collect(g):
    pair = host_pair(g, 1, SAME)
    spans = {"spans": [(0, 20), (20, HIDDEN - 20)]}
    return Call(pair.hosts.collect, {"columns": randn(1 + g.n, HIDDEN), **spans}, held=pair)


@of("GroupHosts.send_states")
def hosts_send(g):
    pair = host_pair(g, 0, FOLLOWING)
    return Call(pair.hosts.send_states, {"states": randn(g.n, HIDDEN)}, held=pair)


@of("GroupHosts.receive_states", "states")
def hosts_receive(g):
    pair = host_pair(g, 1, FOLLOWING)
    return Call(pair.hosts.receive_states, {"states": randn(1 + g.n, HIDDEN)}, held=pair)


def order_arguments(g: Given) -> dict[str, Tensor]:
    return {"token_ids": g.longs(10, 0), "positions": g.longs(8, 2), "slots": g.longs(8, 18), "rows": g.longs(0, 1)}


@of("TeamOrder.order_forward")
def order_forward(g):
    pair = host_pair(g, 0, SAME)
    return Call(pair.order.order_forward, {**order_arguments(g), **g.batch()}, held=pair)


@of("GroupHosts.end_step", "states")
def hosts_end(g):
    pair = host_pair(g, 0, SAME)
    pair.order.order_forward(**order_arguments(g), **g.batch())

    def end(parts: int, states: Tensor) -> bool:
        return pair.hosts.end_step(pair.order, parts, g.module.Kv([kv()]), states)

    return Call(end, {"parts": 1 if g.n else 0, "states": randn(g.n, HIDDEN)}, held=pair)
