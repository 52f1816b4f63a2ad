"""The CPU's plan of a step's attention: every key once, parts that fit together, and threads that end together."""

import heapq
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.ops import native

SPLIT = 1024  # keys that are summed up before sums are merged; a sequence's bits depend on it
FEW_ROWS, MOST_ROWS = 64, 256  # queries x heads of an item
PIECE, PACKING = 16, 2  # queries that ranks do not share; queries that take as long as packing a key
ITEMS_EACH = 4  # for each thread, or items have few rows


class Item(NamedTuple):
    sequence: int
    head: int
    query: int
    queries: int
    first: int
    end: int
    partial: int

    @property
    def keys(self) -> int:
        return self.end - self.first


fresh = st.one_of(st.sampled_from([0, 1]), st.integers(0, 40), st.integers(0, 700))
before = st.one_of(st.sampled_from([0, 1, SPLIT - 1, SPLIT, SPLIT + 1]), st.integers(0, 300), st.integers(0, 9000))
windows = st.one_of(st.just(0), st.sampled_from([1, 2, SPLIT, 4096]), st.integers(1, 3000))


@pytest.fixture(scope="module")
def plan():
    module = native.load()
    if module is None:
        pytest.skip("the extension was not built")
    return module.inside.plan_attention


def make(plan, sizes, form, window, dim=64, rank=0, ranks=1):
    lengths = [q for q, _ in sizes], [q + n for q, n in sizes]
    return [Item(*item) for item in plan(*lengths, *form, dim, window, rank, ranks)]


def busiest(work, threads):
    """When the last thread ends, if a free one takes the next item."""
    busy = [0] * threads
    for size in work:
        heapq.heappush(busy, heapq.heappop(busy) + size)
    return max(busy)


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(fresh, before), max_size=24),
    form=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 7, 16, 40, 100])),
    window=windows,
    dim=st.sampled_from([32, 64, 256]),
    threads=st.integers(1, 16),
)
def test_every_key_once(plan, sizes, form, window, dim, threads):
    """Each query and head has the keys from the first of its window to its own, in items that follow each other. Their
    partial results lie side by side, and the last thread to end is late by at most one largest item."""
    num_heads, group = form
    items, parts, places = make(plan, sizes, form, window, dim), {}, []
    for item in items:
        parts.setdefault((item.sequence, item.head, item.query, item.queries), []).append(item)
        assert item.queries * group <= max(MOST_ROWS, group)
        assert sizes[item.sequence][0] > 1 or item.keys <= SPLIT
    covered = {(sequence, head): [] for sequence in range(len(sizes)) for head in range(num_heads)}
    for (sequence, head, query, queries), of_query in parts.items():
        assert queries > 0
        covered[sequence, head] += range(query, query + queries)
        position = sizes[sequence][1] + query
        of_query.sort(key=lambda item: item.first)
        keys = [key for item in of_query for key in (item.first, item.end)]
        assert keys[0] == (max(0, position - window + 1) if window else 0) and keys[-1] == position + queries
        assert keys[1:-1:2] == keys[2::2]  # each ends where the next begins
        assert all(item.keys > 0 for item in of_query)
        if len(of_query) == 1:
            assert of_query[0].partial == -1
            continue
        assert queries == 1 and all(key % SPLIT == 0 for key in keys[1:-1])
        found = [item.partial for item in of_query]
        assert found == [found[0] + i * group * (dim + 2) for i in range(len(found))]
        places += found
    assert sorted(places) == [i * group * (dim + 2) for i in range(len(places))]
    for (sequence, _), queries in covered.items():
        assert sorted(queries) == list(range(sizes[sequence][0]))
    most = max((item.queries * group for item in items), default=0)
    rows = sum(q * group * num_heads for q, _ in sizes if q > 1)
    assert most <= max(FEW_ROWS, group) or rows >= ITEMS_EACH * native.load().threads() * most
    work = [item.queries * group * item.keys for item in items]
    longest = max((item.keys for item in items), default=0) * max(MOST_ROWS, group)
    assert busiest(work, threads) <= sum(work) / threads + longest


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(fresh, before), max_size=24),
    form=st.tuples(st.integers(1, 6), st.sampled_from([1, 3, 16])),
    window=windows,
    ranks=st.integers(1, 8),
)
def test_ranks_share_a_plan(plan, sizes, form, window, ranks):
    """Each query of each head is one rank's alone, and no rank has much more than the others; whole heads where these
    divide evenly."""
    shares = [make(plan, sizes, form, window, rank=rank, ranks=ranks) for rank in range(ranks)]
    owners: dict[tuple[int, int, int], set[int]] = {}
    for rank, items in enumerate(shares):
        for item in items:
            for query in range(item.query, item.query + item.queries):
                owners.setdefault((item.sequence, item.head, query), set()).add(rank)
    assert len(owners) == form[0] * sum(q for q, _ in sizes)
    assert all(len(ranks_of_query) == 1 for ranks_of_query in owners.values())
    if form[0] % ranks == 0:
        assert all(owner == {head * ranks // form[0]} for (_, head, _), owner in owners.items())
    work, largest = [0.0] * ranks, 0
    for (sequence, _, query), (rank,) in owners.items():
        queries, keys_before = sizes[sequence]
        first, end = query // PIECE * PIECE, min(query // PIECE * PIECE + PIECE, queries)
        seen = min(keys_before + end, end - first + window - 1 if window else keys_before + end)
        piece = seen * (end - first + PACKING)
        work[rank] += piece / (end - first)
        largest = max(largest, piece)
    assert max(work) <= sum(work) / ranks + largest + 1


@settings(deadline=None)
@given(sizes=st.lists(st.tuples(st.just(1), st.integers(2000, 9000)), min_size=8, max_size=40))
def test_long_decodes_are_spread_evenly(plan, sizes):
    """The longest first: what is left for the end is short."""
    lengths = [item.keys for item in make(plan, sizes, (3, 3), 0)]
    assert lengths == sorted(lengths, reverse=True)
    assert busiest(lengths, 4) <= 1.15 * sum(lengths) / 4


def test_lengths_that_cannot_be(plan):
    module = native.load()
    for arguments, name in (
        (([2], [1], 1, 1, 64), "seq_lens"),
        (([-1], [1], 1, 1, 64), "q_lens"),
        (([2**31 - 1, 1], [2**31 - 1, 1], 1, 1, 64), "q_lens"),
        (([1], [1, 1], 1, 1, 64), "seq_lens"),
        (([1], [1], 0, 1, 64), "num_kv_heads"),
        (([1], [1], 1, 0, 64), "group"),
        (([1], [1], 1, 1, 0), "head_dim"),
        (([1], [1], 1, 1, 64, -1), "window"),
        (([1], [1], 1, 1, 64, 0, 0, 0), "ranks"),
        (([1], [1], 1, 1, 64, 0, 2, 2), "rank"),
    ):
        with pytest.raises(module.ArgumentError, match=rf"^{name}: "):
            plan(*arguments)
