"""One good call of everything the extension offers to groups of several hosts."""

import os
import socket
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fenced_calls import HIDDEN, SIZES, U8, VOCAB, Call, Given, kv, of, sampled
from torch import Tensor, ones, randn, zeros


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
