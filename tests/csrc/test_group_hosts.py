"""Hosts of a group that tell each other what they have computed. Each is a thread here, joined by pairs of sockets."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from effort import diagonal
from torch import Tensor

TOKENS, PLAN_BYTES, HIDDEN = 8, 4096, 12
SAME = [(0, 2), (0, 2)]  # layers: both hosts compute all
FOLLOWING = [(0, 1), (1, 1)]
HALVES, ALL = [(0, 1), (1, 1)], [(0, 2), (0, 2)]  # heads
STEP = {
    "token_ids": torch.tensor([3, 1, 4]),
    "positions": torch.tensor([0, 1, 5]),
    "slots": torch.tensor([9, -1, 4]),
    "rows": torch.tensor([2, 0]),
    "cu_q": torch.tensor([0, 2, 3], dtype=torch.int32),
    "seq_lens": torch.tensor([2, 6], dtype=torch.int32),
    "block_tables": torch.tensor([[2, 0], [1, 1]], dtype=torch.int32),
}


@dataclass(slots=True)
class Host:
    """The only rank of a host."""

    team: Any
    hosts: Any
    order: Any


Making = Callable[..., list[Host]]


@pytest.fixture
def made(extension: ModuleType) -> Iterator[Making]:
    """Makes as many hosts as have layers."""
    streams: list[socket.socket] = []

    def make(layers: Sequence[tuple[int, int]], heads: Sequence[tuple[int, int]]) -> list[Host]:
        count, found = len(layers), []
        fds = [[-1] * count for _ in layers]
        for one in range(count):
            for other in range(one):
                ends = socket.socketpair()
                streams.extend(ends)
                fds[one][other], fds[other][one] = (each.fileno() for each in ends)
        for number in range(count):
            memory = torch.zeros(1 << 16, dtype=torch.uint8)
            team = extension.Team(memory[-memory.data_ptr() % 64 :], 0, 1, 5.0)
            hosts = extension.GroupHosts(team, fds[number], number, heads, layers)
            found.append(Host(team, hosts, extension.TeamOrder(team, TOKENS, PLAN_BYTES)))
        return found

    yield make
    for each in streams:
        each.close()


def at_once(*calls: Callable[[], bool]) -> None:
    with ThreadPoolExecutor(len(calls)) as threads:
        assert all(threads.map(lambda call: call(), calls, timeout=30))


def hidden() -> Tensor:
    return torch.zeros(64, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_of_all_hosts_come_together(made: Making, dtype: torch.dtype) -> None:
    """Of rows with more between them, in all hosts or in the front alone. What is beside them stays."""
    whole, spans = torch.randn(5, 12).to(dtype), [(0, 4), (4, 0), (4, 7)]

    def own(host: int) -> Tensor:
        first, count = spans[host]
        mine = torch.full((5, 20), 7.0, dtype=dtype)
        mine[:, first : first + count] = whole[:, first : first + count]
        return mine

    three = made([(0, 2)] * 3, [(0, 1), (1, 0), (1, 1)])
    for call in ("exchange", "collect"):
        columns = [own(host) for host in range(3)]
        calls = [
            partial(getattr(one.hosts, call), mine[:, :12], spans) for one, mine in zip(three, columns, strict=True)
        ]
        at_once(*calls)
        for host, mine in enumerate(columns):
            expected = own(host)
            if call == "exchange" or host == 0:
                expected[:, :11] = whole[:, :11]
            assert torch.equal(mine, expected)


def test_hosts_of_other_layers_exchange_nothing(made: Making) -> None:
    first, second = made(FOLLOWING, ALL)
    mine = torch.ones(2, 4)
    at_once(lambda: first.hosts.exchange(mine, HALVES))
    assert torch.equal(mine, torch.ones(2, 4))
    assert (first.hosts.before, first.hosts.after, second.hosts.before, second.hosts.after) == (-1, 1, 0, -1)
    assert first.hosts.peers == 1 and made(SAME, HALVES)[0].hosts.peers == 2


def test_an_order_is_heard_as_it_was_told_with_what_belongs_to_it(made: Making) -> None:
    front, other = made(SAME, HALVES)
    front.order.order_forward(**STEP)
    arenas = [torch.randn(2, 3, 8), torch.zeros(2, 3, 8)]

    def told() -> bool:
        front.hosts.mirror(arenas[0], torch.tensor([2, 0]))
        return front.hosts.tell(front.order, hidden())

    at_once(told, lambda: other.hosts.hear(other.order, hidden(), arenas[1]))
    assert torch.equal(arenas[1][:, [2, 0]], arenas[0][:, [2, 0]]) and not arenas[1][:, 1].any()
    heard = [torch.from_numpy(np.asarray(each)) for each in other.order.arrays()]
    assert not other.order.wants_logits
    assert all(torch.equal(one, each) for one, each in zip(heard, STEP.values(), strict=True))
    front.order.order_logits(3)
    rows, there = torch.randn(64, HIDDEN), hidden()
    at_once(lambda: front.hosts.tell(front.order, rows), lambda: other.hosts.hear(other.order, there, arenas[1]))
    assert (other.order.wants_logits, other.order.num_rows) == (True, 3)
    assert torch.equal(there[:3], rows[:3]) and not there[3:].any()


def cache(scaled: bool) -> list[Tensor]:
    """Of two layers."""
    if scaled:
        return [torch.randint(-99, 99, (3, 2, 2, 4, 10), dtype=torch.int8) for _ in range(2)]
    return [torch.randn(3, 2, 2, 4, 8) for _ in range(2)]


def slots_of(layer: Tensor, scaled: bool) -> Tensor:
    """[blocks, heads, 2, slots, bytes]: as pages of a scale for each slot have them, behind all numbers."""
    if not scaled:
        return layer
    flat = layer.flatten(3)
    return torch.cat([flat[..., :32].unflatten(3, (4, 8)), flat[..., 32:].unflatten(3, (4, 2))], dim=-1)


@pytest.mark.parametrize(("layers", "scaled"), diagonal([SAME, FOLLOWING], [True, False]))
def test_the_front_gets_what_a_step_has_written_and_the_states_that_it_wants(
    extension: ModuleType, made: Making, layers: list[tuple[int, int]], scaled: bool
) -> None:
    """Of other hosts' heads and layers, and in no other slots."""
    heads = HALVES if layers == SAME else ALL
    pair, kvs, states = (
        made(layers, heads),
        [cache(scaled) for _ in range(2)],
        [torch.randn(3, HIDDEN) for _ in range(2)],
    )
    before = [layer.clone() for layer in kvs[0]]
    expected = states[0].clone()
    if layers == FOLLOWING:
        passed = torch.zeros(3, HIDDEN)
        at_once(lambda: pair[0].hosts.send_states(states[0]), lambda: pair[1].hosts.receive_states(passed))
        assert torch.equal(passed, states[0])
        expected[[2, 0]] = states[1][[2, 0]]

    def ends(host: int) -> Callable[[], bool]:
        pair[host].order.order_forward(**STEP)
        return lambda: pair[host].hosts.end_step(pair[host].order, 1, extension.Kv(kvs[host]), states[host])

    at_once(ends(0), ends(1))
    assert torch.equal(states[0], expected)
    for number, (was, now, theirs) in enumerate(zip(before, *kvs, strict=True)):
        mine, come, old = (slots_of(each, scaled) for each in (now, theirs, was))
        written = old.clone()
        first, count = layers[1]
        if first <= number < first + count:
            for block, at in ((2, 1), (1, 0)):  # slots 9 and 4
                own = slice(heads[1][0], sum(heads[1]))
                written[block, own, :, at] = come[block, own, :, at]
        assert torch.equal(mine, written)


def test_what_a_host_cannot_say_is_refused_by_name(extension: ModuleType, made: Making) -> None:
    front, other = made(FOLLOWING, ALL)
    states, kv = torch.zeros(3, HIDDEN), extension.Kv(cache(False))
    front.order.order_forward(**STEP)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("hosts", lambda: front.hosts.receive_states(states)),
        ("hosts", lambda: other.hosts.send_states(states)),
        ("hosts", lambda: other.hosts.tell(other.order, hidden())),
        ("hosts", lambda: front.hosts.hear(front.order, hidden(), torch.zeros(2, 3, 8))),
        ("spans", lambda: front.hosts.exchange(states, [(0, 6), (6, 7)])),
        ("spans", lambda: front.hosts.collect(states, [(0, 6)])),
        ("states", lambda: front.hosts.end_step(front.order, 1, kv, states[:2])),
        ("parts", lambda: front.hosts.end_step(front.order, 4, kv, states)),
        ("kv", lambda: front.hosts.end_step(front.order, 1, extension.Kv(cache(False)[:1]), states)),
        ("token_ids", lambda: front.order.order_forward(**{**STEP, **dict.fromkeys(
            ("token_ids", "positions", "slots"), torch.zeros(9, dtype=torch.int64))})),
        ("block_tables", lambda: front.order.order_forward(
            **{**STEP, "block_tables": torch.zeros(2, 4096, dtype=torch.int32)})),
        ("memory", lambda: extension.TeamOrder(front.team, 8, 1 << 20)),
    ]  # fmt: skip
    for name, call in wrong:
        with pytest.raises(extension.ArgumentError, match=f"^{name}: "):
            call()
    front.order.order_forward(**{**STEP, "rows": torch.tensor([3]), "slots": torch.tensor([0, 1, 2])})
    with pytest.raises(extension.ArgumentError, match=r"^order: wants rows that are no tokens"):
        front.hosts.end_step(front.order, 1, kv, states)
    front.order.order_forward(**{**STEP, "slots": torch.tensor([0, 1, 12])})
    with pytest.raises(extension.ArgumentError, match=r"^order: names a slot that is not there"):
        front.hosts.end_step(front.order, 1, kv, states)
    with pytest.raises(extension.ArgumentError, match=r"^order: is not that of a step"):
        front.order.order_logits(1)
        front.order.arrays()
