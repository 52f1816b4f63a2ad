"""Attention over pages (`paged_attention`) against float64 written out, with traps where no kernel may look."""

import copy
import random

import pytest
import torch
from caches import KINDS, LAYOUTS, Cache, filled
from effort import draws
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=draws(5, 40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
seeds = st.integers(0, 2**32 - 1)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# With pages of bfloat16 or 8 bits these round queries and weights to bfloat16; the definition does not.
ROUNDING = ("emulated", "avx512_bf16", "amx")
UNIT = 2.0**-8  # a number rounded to bfloat16 is off by this part of it at most
PLAIN = {"window": 0, "soft_cap": 0.0, "alibi": None, "sinks": None, "sparse": [], "bias": None, "both_ways": False}


class Case:
    """Random sequences in shuffled blocks; unused slots hold NaN, tables end in garbage. `fixed`: what is not drawn."""

    def __init__(self, seed: int, kv: Cache | None = None, **fixed: object) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)

        def pick(name: str, *values: object):
            drawn = rng.choice(values)
            return fixed.get(name, drawn)

        self.size = size = pick("size", 8, 16, 32, 64, 128)
        self.heads, self.group = pick("heads", 1, 2, 3), pick("group", 1, 2, 3, 7, 16)
        self.dim = pick("dim", 32, 64, 80, 96, 112, 128, 192, 256, 576)
        layout, kind = pick("layout", *LAYOUTS), pick("kind", *KINDS)
        self.dtype = pick("dtype", torch.float32, torch.float32, torch.float16, torch.bfloat16)
        lengths = [0, 1, size - 1, size, size + 1, rng.randint(1, 200)]
        kv_lens = [rng.choice(lengths) for _ in range(rng.randint(1, 5))]
        self.kv_lens = fixed.get("kv_lens", kv_lens)
        q_lens = [min(n, rng.choice([0, 1, 1, n, rng.randint(1, 200)])) for n in kv_lens]
        self.q_lens = fixed.get("q_lens", q_lens)
        counts = [-(-n // size) for n in self.kv_lens]
        free = list(range(sum(counts) + 2))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.kv = kv or Cache(rng, layout, kind, sum(counts) + 2, self.heads, size, self.dim)
        for sequence, length in enumerate(self.kv_lens if kv is None else ()):
            for p in range(length):
                self.put(sequence, p, torch.randn(2, self.heads, self.dim))
        stored = self.kv.read()
        self.dense = [  # the keys and values that each sequence has stored, [2, length, heads, dim]
            stored[table].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length]
            for table, length in zip(self.tables, self.kv_lens, strict=True)
        ]
        many = self.heads * self.group
        self.queries = torch.randn(sum(self.q_lens), many, self.dim).to(self.dtype)
        self.options = {
            "scale": rng.choice([0.2, self.dim**-0.5]),
            "window": rng.choice([0, 0, 1, 5, size, 40]),
            "soft_cap": rng.choice([0.0, 0.0, 2.0]),
            "alibi": torch.rand(many) if rng.random() < 0.3 else None,
            "sinks": torch.randn(many) if rng.random() < 0.3 else None,
            "sparse": [],
        }
        if rng.random() < 0.3:
            parts = (0, 1, 3), (2, 3), (8, 24, 64), (-1, 0, 1, 2), (0, 2)
            self.options["sparse"] = [rng.choice(values) for values in parts]
        reach, masked = rng.choice([0, 3, 20, 300]), self.options["window"] or self.options["sparse"]
        self.options["bias"] = torch.randn(many, 2 * reach + 1) if rng.random() < 0.3 else None
        self.options["both_ways"] = not masked and rng.random() < 0.4
        unseen = [rng.randint(0, n - q) for n, q in zip(self.kv_lens, self.q_lens, strict=True)]
        self.starts = unseen if rng.random() < 0.3 and "options" not in fixed else [0] * len(unseen)
        self.options |= fixed.get("options", {})
        self.garbage = [rng.choice([-(2**31), 2**31 - 1, 10**6]) for _ in range(3)]

    def put(self, sequence: int, position: int, row: torch.Tensor) -> None:
        self.kv.put(self.tables[sequence][position // self.size] * self.size + position % self.size, *row)

    def run(self, kernels, kv=None, tables=None, only=None) -> torch.Tensor:
        """Runs the op for all sequences, or for one."""
        chosen = slice(None) if only is None else slice(only, only + 1)
        tables, ends = (tables or self.tables)[chosen], torch.tensor([0, *self.q_lens]).cumsum(0)
        width = max(map(len, tables), default=0) + 3
        rows = torch.tensor([(table + self.garbage * width)[:width] for table in tables], dtype=torch.int32)
        queries = self.queries if only is None else self.queries[ends[only] : ends[only + 1]]
        lens = self.q_lens[chosen], self.kv_lens[chosen]
        starts = torch.tensor(self.starts[chosen], dtype=torch.int32) if any(self.starts) else None
        return (kv or self.kv).attend(kernels, queries, *lens, rows, **self.options, starts=starts)

    def run_query(self, kernels, sequence: int, query: int) -> torch.Tensor:
        """One query of a sequence, as a decode: what comes after it has not been written yet."""
        one, row = copy.copy(self), sum(self.q_lens[:sequence]) + query
        one.q_lens, one.kv_lens = [1], [self.kv_lens[sequence] - self.q_lens[sequence] + query + 1]
        one.tables, one.queries = [self.tables[sequence]], self.queries[row : row + 1]
        one.starts = [self.starts[sequence]]
        return one.run(kernels)

    def check(self, rounding: bool, result: torch.Tensor) -> None:
        """A weight that was rounded is off by UNIT of itself at most, so a sum of values is by UNIT of theirs. A score
        of many products is off by the rounding of their sum, and its weight by as much of itself."""
        rounds = rounding and self.kv.kind not in ("float32", "float16")
        expected, sizes = self.expected(rounds)
        off = 2**-23 * self.dim * self.options["scale"] + (UNIT if rounds else 0)
        allowed = TOLERANCE[self.dtype] * (1 + expected.abs()) + off * sizes
        assert result.dtype == self.dtype and ((result.double() - expected).abs() <= allowed).all()

    def expected(self, rounds: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """What each query takes, and what it would take if all values were positive."""
        queries = (self.queries.bfloat16() if rounds else self.queries).double()
        rows = []
        for dense, q_len, kv_len, start in zip(self.dense, self.q_lens, self.kv_lens, self.starts, strict=True):
            for position in range(kv_len - q_len, kv_len):
                rows.append(self._row(queries[len(rows)], dense.double(), position, start))
        both = torch.stack(rows) if rows else torch.empty(0, 2, *self.queries.shape[1:], dtype=torch.float64)
        return both[:, 0], both[:, 1]

    def _row(self, query: torch.Tensor, dense: torch.Tensor, position: int, start: int) -> torch.Tensor:
        o = self.options
        first = max(start, position - o["window"] + 1) if o["window"] else start
        end = dense.shape[1] if o["both_ways"] else position + 1
        keys, values = dense[:, first:end].repeat_interleave(self.group, dim=2)
        scores = torch.einsum("hd,khd->hk", query, keys) * o["scale"]
        if o["soft_cap"]:
            scores = torch.tanh(scores / o["soft_cap"]) * o["soft_cap"]
        if o["alibi"] is not None:
            scores = scores + o["alibi"].double()[:, None] * (torch.arange(first, end) - position)
        if o["bias"] is not None:
            reach = o["bias"].shape[1] // 2
            scores = scores + o["bias"].double()[:, (torch.arange(first, end) - position).clamp(-reach, reach) + reach]
        scores = scores.masked_fill(~self._seen(first, position, end), float("-inf"))
        top = scores.amax(1, keepdim=True).clamp(min=-1e300)
        weights = (scores - top).exp()
        total = weights.sum(1, keepdim=True)
        if o["sinks"] is not None:
            total = total + (o["sinks"].double()[:, None] - top).exp()
        return torch.einsum("hk,skhd->shd", (weights / total).nan_to_num(0), torch.stack([values, values.abs()]))

    def _seen(self, first: int, position: int, end: int) -> torch.Tensor:
        """Which keys block-sparse attention lets each head see, as vLLM's kernel says it."""
        heads = self.heads * self.group
        if not self.options["sparse"]:
            return torch.ones(heads, end - first, dtype=torch.bool)
        local, stride, size, step, rank = self.options["sparse"]
        blocks = torch.arange(first, end) // size
        if step >= 0:
            offsets = (rank * heads + torch.arange(heads)) * step + 1
        else:
            offsets = (rank * self.heads + torch.arange(heads) // self.group) * -step + 1
        return ((blocks + offsets[:, None]) % stride == 0) | (blocks > position // size - local)


@pytest.fixture
def rounding(request: pytest.FixtureRequest) -> bool:
    return request.node.callspec.params["kernels"] in ROUNDING


@pytest.mark.scaled
@fuzz
@given(seed=seeds)
@example(seed=2046119)  # 576 dimensions, and scores of 20
def test_it_is_its_definition(kernels, rounding, seed):
    case = Case(seed)
    case.check(rounding, case.run(kernels))


@pytest.mark.scaled
@fuzz
@given(seed=seeds)
def test_neither_places_nor_neighbours_nor_pieces_change_a_bit(kernels, seed):
    """All blocks moved; each sequence alone; and as decodes: one that another worker replays has the same tokens."""
    case = Case(seed)
    result = case.run(kernels)
    order = torch.randperm(case.kv.parts[0].shape[0])
    tables = [[int(order[block]) for block in table] for table in case.tables]
    assert torch.equal(case.run(kernels, case.kv.moved(order), tables), result)
    for i, rows in enumerate(result.split(case.q_lens)):
        assert torch.equal(case.run(kernels, only=i), rows)
        for query in {0, len(rows) // 3, len(rows) - 1} if len(rows) and not case.options["both_ways"] else ():
            assert torch.equal(case.run_query(kernels, i, query)[0], rows[query])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["hnd", "xpack"])
def test_broken_values_reach_those_that_see_them(kernels, kind, layout):
    """A prompt of 80 tokens, some of whose values are no numbers: queries before them have the bits they would have
    without, and those after them are as broken in a decode as in the prompt."""
    form = {"size": 16, "heads": 1, "group": 3, "dim": 64, "dtype": torch.float32, "layout": layout, "kind": kind}
    case = Case(3, **form, kv_lens=[80], q_lens=[80], options=PLAIN)
    sound, rows = case.run(kernels), torch.randn(2, 2, 1, 64)
    assert sound.isfinite().all()
    rows[0, 1, 0, 3], rows[1, 1, 0, 9] = torch.inf, torch.nan
    for position, row in zip((41, 70), rows, strict=True):
        case.put(0, position, row)
    result = case.run(kernels)
    assert torch.equal(result[:41], sound[:41])
    assert not result[41:, :, 3].isfinite().any() and result[70:, :, 9].isnan().all()
    for query in (40, 41, 63, 64, 69, 70, 79):
        assert torch.equal(case.run_query(kernels, 0, query)[0].nan_to_num(), result[query].nan_to_num())
    # Two queries of one head are one block of rows, and the first does not see the broken value of the second.
    case.group, case.kv_lens, case.q_lens, case.queries = 1, [71], [2], case.queries[69:71, :1].contiguous()
    assert torch.equal(case.run(kernels)[0].nan_to_num(), result[69, :1].nan_to_num())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8_e4m3", "int8_paged"])
@pytest.mark.parametrize("window", [0, 1500])
def test_long_decodes_are_split_and_put_together(kernels, rounding, window, kind):
    torch.manual_seed(0)
    form = {"size": 16, "heads": 2, "group": 3, "dim": 64, "dtype": torch.float32, "q_lens": [1, 1, 1, 1]}
    options = PLAIN | {"scale": 0.3 if kind in ("float32", "bfloat16") else 0.01, "window": window}
    kv = filled(random.Random(0), "hnd", kind, 420, 2, 16, 64)
    case = Case(3, kv, **form, kv_lens=[2500, 1024, 1025, 2048], options=options | {"sinks": torch.randn(6)})
    result = case.run(kernels)
    case.check(rounding, result)
    assert torch.equal(case.run(kernels, only=2), result[2:3])


def test_nan_within_reach_shows(kernels):
    """In keys and in values: a sequence must not say something sensible over broken memory."""
    for side in (0, 1):
        cache, tables = filled(random.Random(0), "hnd", "float32", 4, 1, 16, 32), torch.tensor([[0, 1], [3, 2]]).int()
        cache.parts[0][2, 0, side, 5] = float("nan")
        out = cache.attend(kernels, torch.randn(2, 2, 32), [1, 1], [32, 32], tables, scale=0.2)
        assert out[0].isfinite().all() and out[1].isnan().all()
