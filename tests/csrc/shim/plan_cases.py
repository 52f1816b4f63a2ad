"""The planner: every key once, within capacity, and the load even."""

from typing import Any

import _C_cuda_shim as native
import numpy as np

ITEM_COST = 64


def plan_case(rng: Any) -> None:
    from hypothesis import given, seed, settings
    from hypothesis import strategies as st

    lens = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 9000)), min_size=1, max_size=40)

    @seed(int(rng.integers(1 << 30)))
    @settings(max_examples=60, database=None, deadline=None)
    @given(
        lens, st.integers(1, 9), st.integers(1, 270), st.sampled_from([0, 0, 100, 4096]), st.sampled_from([0, 0, 256])
    )
    def check(lens: list[int], heads: int, slots: int, window: int, fixed: int) -> None:
        packed = native.plan_decode(lens, heads, slots, window, fixed)
        items = check_plan(packed, lens, heads, slots, window)
        most_items, most_partials = native.plan_capacity(len(lens), max(lens), heads, slots, fixed)
        assert len(items) <= most_items and packed[2] <= most_partials
        if fixed:
            assert all(end % fixed == 0 or end == lens[s] for s, _, _, end, *_ in items.tolist())

    check()

    @seed(int(rng.integers(1 << 30)))
    @settings(max_examples=30, database=None, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 500)), min_size=1, max_size=9), st.integers(1, 5))
    def check_prefill(sizes: list[tuple[int, int]], group: int) -> None:
        q_lens = [q for q, _ in sizes]
        packed = native.plan_prefill(q_lens, [q + n for q, n in sizes], group, 64, 3, 7)
        items = np.frombuffer(packed[1], dtype=np.int32).reshape(-1, 8)
        slots = np.frombuffer(packed[0], dtype=np.int32)
        assert slots[0] == 0 and slots[-1] == len(items) and (np.diff(slots) >= 0).all() and len(slots) == 8
        seen = sorted((s, h, r) for s, h, begin, end, *_ in items.tolist() for r in range(begin, end))
        assert seen == [(s, h, r) for s, q in enumerate(q_lens) for h in range(3) for r in range(q * group)]
        assert (items[:, 3] - items[:, 2] <= 64).all()

    check_prefill()


def check_plan(
    packed: tuple[bytes, bytes, int, int], lens: list[int], heads: int, slots: int, window: int
) -> np.ndarray:
    """Every key once, parts numbered in order, and the load even."""
    items = np.frombuffer(packed[1], dtype=np.int32).reshape(-1, 8)
    starts = np.frombuffer(packed[0], dtype=np.int32)
    assert len(starts) == slots + 1 and starts[0] == 0 and starts[-1] == len(items) and (np.diff(starts) >= 0).all()
    pieces: dict[tuple[int, int], list[list[int]]] = {}
    for sequence, head, *rest in items.tolist():
        pieces.setdefault((sequence, head), []).append(rest)
    assert len(pieces) == len(lens) * heads
    partials, counters = [], []
    for (sequence, _), parts in pieces.items():
        parts.sort()
        at = max(0, lens[sequence] - window) if window else 0
        for i, (begin, end, partial, first, count, _) in enumerate(parts):
            assert begin == at and (end > begin or lens[sequence] == 0) and count == len(parts)
            at = end
            assert partial == (-1 if count == 1 else first + i)
            partials += [partial] if partial >= 0 else []
        assert at == lens[sequence]
        counters += [parts[0][5]] if len(parts) > 1 else []
        assert len({part[5] for part in parts}) == 1 or len(parts) == 1
    assert sorted(partials) == list(range(packed[2])) and sorted(counters) == list(range(packed[3]))
    costs = np.concatenate(([0], np.cumsum(items[:, 3] - items[:, 2] + ITEM_COST)))
    loads = costs[starts[1:]] - costs[starts[:-1]]
    mean = (costs[-1] + ITEM_COST * slots) / slots
    if mean >= 600 and (items[:, 3] - items[:, 2]).max(initial=0) > 256:  # cut where it is worth a cut
        assert loads.max() <= 1.15 * mean, (loads.max(), mean)
    return items
