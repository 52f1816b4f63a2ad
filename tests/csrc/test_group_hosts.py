"""Hosts of a group that tell each other what they have computed. Each is a thread here, joined by pairs of sockets."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from effort import diagonal
from joined_hosts import Host, at_once, joined_hosts
from torch import Tensor

HIDDEN = 12
OFF = [1.0, 0.1, 0.0]  # filters
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


Making = Callable[..., list[Host]]


@pytest.fixture
def made(extension: ModuleType) -> Iterator[Making]:
    """Makes as many hosts as have layers."""
    with ExitStack() as stack:
        yield lambda layers, heads: stack.enter_context(joined_hosts(extension, layers, heads))


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


@pytest.mark.parametrize(("layers", "heads"), [(SAME, HALVES), (FOLLOWING, ALL)])
def test_an_order_is_heard_as_it_was_told_with_what_belongs_to_it(
    made: Making, layers: list[tuple[int, int]], heads: list[tuple[int, int]]
) -> None:
    """Of blocks that come before it, a host gets what it reads."""
    front, other = made(layers, heads)
    front.order.order_forward(**STEP)
    arenas = [torch.randn(2, 3, 2, 4), torch.zeros(2, 3, 2, 4)]

    def told() -> bool:
        front.hosts.mirror(arenas[0], torch.tensor([2, 0]))
        return front.hosts.tell(front.order, hidden())

    at_once(told, lambda: other.hosts.hear(other.order, hidden(), arenas[1]))
    expected, own = torch.zeros(2, 3, 2, 4), [slice(first, first + count) for first, count in (layers[1], heads[1])]
    for block in (2, 0):
        expected[own[0], block, own[1]] = arenas[0][own[0], block, own[1]]
    assert torch.equal(arenas[1], expected)
    heard = [torch.from_numpy(np.asarray(each)) for each in other.order.arrays()]
    assert not other.order.wants_logits
    assert all(torch.equal(one, each) for one, each in zip(heard, STEP.values(), strict=True))
    front.order.order_logits(3)
    rows, there = torch.randn(64, HIDDEN), hidden()
    at_once(lambda: front.hosts.tell(front.order, rows), lambda: other.hosts.hear(other.order, there, arenas[1]))
    assert (other.order.wants_logits, other.order.num_rows) == (True, 3)
    assert torch.equal(there[:3], rows[:3]) and not there[3:].any()


def branches(**given: list[float]) -> dict[str, Tensor]:
    """What `sample` is given of as many branches as rows, but for what is off."""
    count = len(given["temperature"])
    floats = {"top_p": [1.0] * count, "min_p": [0.0] * count, **given}
    draws = {name: torch.tensor(values) for name, values in floats.items() if name != "top_k"}
    numbers = torch.arange(count)
    draws |= {"top_k": torch.tensor(given["top_k"], dtype=torch.int32), "filters": torch.tensor([OFF] * count)}
    return draws | {"rows": numbers, "seed": numbers, "branch": numbers, "index": numbers}


def test_a_host_sends_what_is_looked_at(extension: ModuleType, made: Making) -> None:
    """The likeliest, those that are named, NaN if there is one, and what a mask leaves; a row whose filter sees all
    tokens; and a token that was drawn. The front has -inf in the place of the others, and of its own all."""
    front, other = made(SAME, HALVES)
    logits, spans = torch.arange(64.0).repeat(6, 1) / 16, [(0, 32), (32, 32)]
    logits[0, [40, 41]], logits[2, 60] = 9.0, torch.nan
    given = branches(temperature=[1.0, 1.0, 0.0, 0.0, 1.0, 0.0], top_k=[2, 0, 0, 0, 0, 0])
    given["filters"][1, 0] = 0.5
    given |= {"bias_ends": torch.tensor([0, 2, 2, 2, 2, 2, 2]), "bias_ids": torch.tensor([50, 1])}
    given |= {"biases": torch.zeros(2), "mask_of": torch.tensor([-1, -1, -1, 0, -1, -1], dtype=torch.int32)}
    given |= {"masks": torch.tensor([[-1, 0x3F]], dtype=torch.int32)}
    given |= {"counts": torch.tensor([-1, -1, -1, -1, -1, 2], dtype=torch.int32)}
    drawn, totals = torch.zeros((2, 6), dtype=torch.int64)
    wanted = extension.WantedLogits(6, 64, drawn, totals, **given)
    front.order.order_logits(6)
    out = logits.clone()
    out[:, 32:] = 1.0

    def tells() -> bool:
        return front.hosts.tell(front.order, hidden(), wanted) and front.hosts.collect(out, spans)

    def hears() -> bool:
        arena = torch.zeros(2, 3, 8)
        return other.hosts.hear(other.order, hidden(), arena) and other.hosts.collect(logits.clone(), spans)

    at_once(tells, hears)
    expected = torch.full((6, 64), -torch.inf)
    for row, ids in enumerate(([40, 41, 50], range(32, 64), [60], [37, 63], [drawn[4], 63], [62, 63])):
        expected[row, list(ids)] = logits[row, list(ids)]
    expected[:, :32] = logits[:, :32]
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert drawn[4] >= 32  # of this seed
    assert drawn.tolist() == [-1, -1, -1, -1, drawn[4], -1]
    weights = torch.exp((logits[5] - logits[5].max()).double()).sum() * 2**40
    assert totals[:5].tolist() == [0] * 5 and totals[5].item() == pytest.approx(weights.item(), rel=1e-5)


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
    given, nothing = branches(temperature=[0.0] * 3, top_k=[0] * 3), torch.zeros((2, 3), dtype=torch.int64)
    wanted = extension.WantedLogits(3, 64, *nothing, **given)
    front.order.order_forward(**STEP)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("hosts", lambda: front.hosts.receive_states(states)),
        ("hosts", lambda: other.hosts.send_states(states)),
        ("hosts", lambda: other.hosts.tell(other.order, hidden())),
        ("hosts", lambda: front.hosts.hear(front.order, hidden(), torch.zeros(2, 3, 8))),
        ("spans", lambda: front.hosts.exchange(states, [(0, 6), (6, 7)])),
        ("spans", lambda: front.hosts.collect(states, [(0, 6)])),
        ("arena", lambda: front.hosts.mirror(torch.zeros(1, 3, 8), torch.tensor([0]))),
        ("rows", lambda: wanted.rows(2, 2)),
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
