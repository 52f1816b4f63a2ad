"""The planner: every key once, within capacity, and the load even."""

from typing import Any

import _C_cuda_simt as native
import numpy as np

ITEM_COST = 64
MOST_PARTS = 256


def plan_case(rng: Any) -> None:
    from hypothesis import given, seed, settings
    from hypothesis import strategies as st

    decodes = st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 300), st.integers(0, 9000)))
    prompts = st.tuples(st.integers(0, 90), st.one_of(st.just(0), st.integers(0, 500), st.integers(0, 9000)))
    sizes = st.one_of(st.lists(decodes, min_size=1, max_size=40), st.lists(prompts, min_size=1, max_size=9))
    forms = st.tuples(st.integers(1, 9), st.integers(1, 17), st.sampled_from([8, 16, 64]), st.integers(1, 270))

    @seed(int(rng.integers(1 << 30)))
    @settings(max_examples=80, database=None, deadline=None)
    @given(
        *(sizes, forms, st.sampled_from([0, 0, 100, 4096]), st.sampled_from([0, 0, 256]), st.sampled_from([1.0, 1.15]))
    )
    def check(sizes: Any, form: tuple[int, int, int, int], window: int, fixed: int, even_enough: float) -> None:
        q_lens = [q for q, _ in sizes]
        lens = [q + n for q, n in sizes]
        packed = native.plan_attention(q_lens, lens, *form, window, fixed, even_enough)
        items = check_plan(packed, q_lens, lens, form, window, even_enough if not fixed else np.inf)
        most_items, most_partials = native.plan_capacity(len(lens), sum(q_lens), *form, fixed, max(lens))
        assert len(items) <= most_items and packed[2] <= most_partials
        if fixed:
            assert all(item[4] % fixed == 0 or item[5] == item[6] - 1 for item in items.tolist())

    check()
    # A tile has a bounded number of parts, however many thread blocks there are.
    form = 1, int(rng.integers(1, 9)), 8, int(rng.integers(200, 3000))
    lens = [int(rng.integers(10**5, 10**6)), 700]
    items = check_plan(native.plan_attention([1, 1], lens, *form, 0, 0, 1.0), [1, 1], lens, form, 0, np.inf)
    assert items[:, 6].max() <= MOST_PARTS


def check_plan(
    packed: tuple[bytes, bytes, int],
    q_lens: list[int],
    lens: list[int],
    form: tuple[int, int, int, int],
    window: int,
    even_enough: float,
) -> np.ndarray:
    """Every key of every tile once, parts numbered in order, and the load even."""
    kv_heads, group, rows, slots = form
    items = np.frombuffer(packed[1], dtype=np.int32).reshape(-1, 8)
    starts = np.frombuffer(packed[0], dtype=np.int32)
    assert len(starts) == slots + 1 and starts[0] == 0 and starts[-1] == len(items) and (np.diff(starts) >= 0).all()
    tiles: dict[tuple[int, int, int], list[list[int]]] = {}
    for sequence, head, row, *rest in items.tolist():
        tiles.setdefault((sequence, head, row), []).append(rest)
    assert sorted(tiles) == [
        (s, head, row) for s, q in enumerate(q_lens) for head in range(kv_heads) for row in range(0, q * group, rows)
    ]
    partials = []
    for (sequence, _, row), parts in tiles.items():
        parts.sort(key=lambda part: part[2])
        first = lens[sequence] - q_lens[sequence] + row // group
        end_row = min(row + rows, q_lens[sequence] * group)
        at = max(0, first - window + 1) if window else 0
        for i, (begin, end, part, count, place) in enumerate(parts):
            assert begin == at and (end > begin or count == 1) and (part, count) == (i, len(parts))
            at = end
            partials += [place + i] if count > 1 else []
            assert place == parts[0][4]
        assert at == lens[sequence] - q_lens[sequence] + (end_row - 1) // group + 1
    assert sorted(partials) == list(range(packed[2]))
    costs = np.concatenate(([0], np.cumsum(items[:, 4] - items[:, 3] + ITEM_COST)))
    loads = costs[starts[1:]] - costs[starts[:-1]]
    mean = (costs[-1] + ITEM_COST * slots) / slots
    if mean >= 600 and (items[:, 4] - items[:, 3]).max(initial=0) > 256:  # cut where it is worth a cut
        assert loads.max() <= max(1.15, even_enough) * mean, (loads.max(), mean)
    return items
