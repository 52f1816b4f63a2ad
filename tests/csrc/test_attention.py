"""Attention over pages against float64 written out, with traps where no kernel may look."""

import copy
import random

import pytest
import torch
from caches import KINDS, LAYOUTS, Cache
from effort import draws
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

fuzz = settings(max_examples=draws(5, 40), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# With pages of bfloat16 or 8 bits these round queries and weights to bfloat16; the definition does not.
ROUNDING = ("emulated", "avx512_bf16", "amx")
UNIT = 2.0**-8  # a number rounded to bfloat16 is off by this part of it at most


class Case:
    """Random sequences in shuffled blocks; unused slots hold NaN, tables end in garbage."""

    def __init__(self, seed: int, longest: int = 200) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.size = size = rng.choice([8, 16, 32, 64, 128])
        self.heads, self.group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 7, 16])
        self.dim = rng.choice([32, 64, 80, 96, 112, 128, 192, 256, 576])
        layout, kind = rng.choice(LAYOUTS), rng.choice(KINDS)
        self.dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        lengths = [0, 1, size - 1, size, size + 1, rng.randint(1, longest)]
        self.kv_lens = [rng.choice(lengths) for _ in range(rng.randint(1, 5))]
        self.q_lens = [min(n, rng.choice([0, 1, 1, n, rng.randint(1, longest)])) for n in self.kv_lens]
        counts = [-(-n // size) for n in self.kv_lens]
        num_blocks = sum(counts) + 2
        free = list(range(num_blocks))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.kv = Cache(rng, layout, kind, num_blocks, self.heads, size, self.dim)
        for table, length in zip(self.tables, self.kv_lens, strict=True):
            for p in range(length):
                self.kv.put(table[p // size] * size + p % size, *torch.randn(2, self.heads, self.dim))
        self._take_dense()
        self.queries = torch.randn(sum(self.q_lens), self.heads * self.group, self.dim).to(self.dtype)
        self.options = {
            "scale": rng.choice([0.2, self.dim**-0.5]),
            "window": rng.choice([0, 0, 1, 5, size, 40]),
            "soft_cap": rng.choice([0.0, 0.0, 2.0]),
            "alibi": torch.rand(self.heads * self.group) if rng.random() < 0.3 else None,
            "sinks": torch.randn(self.heads * self.group) if rng.random() < 0.3 else None,
            "sparse": [],
        }
        if rng.random() < 0.3:
            self.options["sparse"] = [
                *(rng.choice([0, 1, 3]), rng.choice([2, 3]), rng.choice([8, 24, 64]), rng.choice([-1, 0, 1, 2])),
                rng.choice([0, 2]),
            ]
        self.garbage = [rng.choice([-(2**31), 2**31 - 1, 10**6]) for _ in range(3)]

    def _take_dense(self) -> None:
        """The keys and values that each sequence has stored, [2, length, heads, dim]."""
        stored = self.kv.read()
        self.dense = [
            stored[table].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length]
            for table, length in zip(self.tables, self.kv_lens, strict=True)
        ]

    def run(self, kernels, kv=None, tables=None, only=None) -> torch.Tensor:
        """Runs the op for all sequences, or for one."""
        chosen = range(len(self.q_lens)) if only is None else [only]
        tables = tables or self.tables
        width = max((len(tables[i]) for i in chosen), default=0) + 3
        rows = torch.tensor([(tables[i] + self.garbage * width)[:width] for i in chosen], dtype=torch.int32)
        ends = torch.tensor([0, *self.q_lens]).cumsum(0)
        queries = self.queries if only is None else self.queries[ends[only] : ends[only + 1]]
        cu_q = torch.tensor([0, *(self.q_lens[i] for i in chosen)]).cumsum(0).int()
        seq_lens = torch.tensor([self.kv_lens[i] for i in chosen], dtype=torch.int32)
        out = torch.full(queries.shape, float("nan"), dtype=self.dtype)
        handle = (kv or self.kv).handle(kernels)
        kernels.paged_attention(out, queries, handle, cu_q, seq_lens, rows, **self.options)
        return out

    def run_query(self, kernels, sequence: int, query: int) -> torch.Tensor:
        """One query of a sequence, as a decode: what comes after it has not been written yet."""
        before = self.kv_lens[sequence] - self.q_lens[sequence]
        one = copy.copy(self)
        one.q_lens, one.kv_lens = [1], [before + query + 1]
        one.tables = [self.tables[sequence]]
        row = sum(self.q_lens[:sequence]) + query
        one.queries = self.queries[row : row + 1]
        return one.run(kernels)

    def check(self, rounding: bool, result: torch.Tensor) -> None:
        """A weight that was rounded is off by UNIT of itself at most, so a sum of values is by UNIT of theirs. A score
        of many products is off by the rounding of their sum, and its weight by as much of itself."""
        rounds = rounding and self.kv.kind not in ("float32", "float16")
        expected, sizes = self.expected(rounds)
        tolerance = TOLERANCE[self.dtype]
        off = 2**-23 * self.dim * self.options["scale"] + (UNIT if rounds else 0)
        allowed = tolerance * (1 + expected.abs()) + off * sizes
        assert ((result.double() - expected).abs() <= allowed).all()

    def expected(self, rounds: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """What each query takes, and what it would take if all values were positive."""
        queries = (self.queries.bfloat16() if rounds else self.queries).double()
        rows = []
        for dense, q_len, kv_len in zip(self.dense, self.q_lens, self.kv_lens, strict=True):
            for position in range(kv_len - q_len, kv_len):
                rows.append(self._row(queries[len(rows)], dense.double(), position))
        both = torch.stack(rows) if rows else torch.empty(0, 2, *self.queries.shape[1:], dtype=torch.float64)
        return both[:, 0], both[:, 1]

    def _row(self, query: torch.Tensor, dense: torch.Tensor, position: int) -> torch.Tensor:
        o = self.options
        first = max(0, position - o["window"] + 1) if o["window"] else 0
        keys, values = dense[:, first : position + 1].repeat_interleave(self.group, dim=2)
        seen = self._seen(first, position)
        scores = torch.einsum("hd,khd->hk", query, keys) * o["scale"]
        if o["soft_cap"]:
            scores = torch.tanh(scores / o["soft_cap"]) * o["soft_cap"]
        if o["alibi"] is not None:
            scores = scores + o["alibi"].double()[:, None] * (torch.arange(first, position + 1) - position)
        scores = scores.masked_fill(~seen, float("-inf"))
        top = scores.amax(1, keepdim=True).clamp(min=-1e300)
        weights = (scores - top).exp()
        total = weights.sum(1, keepdim=True)
        if o["sinks"] is not None:
            total = total + (o["sinks"].double()[:, None] - top).exp()
        return torch.einsum("hk,skhd->shd", (weights / total).nan_to_num(0), torch.stack([values, values.abs()]))

    def _seen(self, first: int, position: int) -> torch.Tensor:
        """Which keys block-sparse attention lets each head see, as vLLM's kernel says it."""
        heads = self.heads * self.group
        if not self.options["sparse"]:
            return torch.ones(heads, position + 1 - first, dtype=torch.bool)
        local, stride, size, step, rank = self.options["sparse"]
        blocks = torch.arange(first, position + 1) // size
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
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=2046119)  # 576 dimensions, and scores of 20
def test_it_is_its_definition(kernels, rounding, seed):
    case = Case(seed)
    result = case.run(kernels)
    assert result.dtype == case.dtype
    case.check(rounding, result)


@pytest.mark.scaled
@fuzz
@given(seed=st.integers(0, 2**32 - 1))
def test_neither_places_nor_neighbours_change_a_bit(kernels, seed):
    """Moving all blocks, and running each sequence alone."""
    case = Case(seed)
    result = case.run(kernels)
    order = torch.randperm(case.kv.parts[0].shape[0])
    moved = case.kv.moved(order)
    tables = [[int(order[block]) for block in table] for table in case.tables]
    assert torch.equal(case.run(kernels, moved, tables), result)
    ends = torch.tensor([0, *case.q_lens]).cumsum(0)
    for i in range(len(case.q_lens)):
        assert torch.equal(case.run(kernels, only=i), result[ends[i] : ends[i + 1]])


@pytest.mark.scaled
@fuzz
@given(seed=st.integers(0, 2**32 - 1))
def test_a_decode_has_the_bits_of_a_prompt(kernels, seed):
    """A sequence that another worker replays goes on with the same tokens."""
    case = Case(seed)
    result = case.run(kernels)
    for sequence, q_len in enumerate(case.q_lens):
        begin = sum(case.q_lens[:sequence])
        for query in {0, q_len // 3, q_len - 1} if q_len else ():
            assert torch.equal(case.run_query(kernels, sequence, query)[0], result[begin + query])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["hnd", "xpack"])
def test_broken_values_reach_those_that_see_them(kernels, kind, layout):
    """A prompt of 80 tokens, some of whose values are no numbers: queries before them have the bits they would have
    without, and those after them are as broken in a decode as in the prompt."""
    case = Case(3)
    case.size, case.heads, case.group, case.dim, case.dtype = 16, 1, 3, 64, torch.float32
    case.kv = Cache(random.Random(0), layout, kind, 8, 1, 16, 64)
    case.tables, case.kv_lens, case.q_lens = [[5, 1, 4, 0, 3]], [80], [80]
    torch.manual_seed(0)
    rows = torch.randn(80, 2, 1, 64)
    case.queries = torch.randn(80, 3, 64)
    case.options |= {"window": 0, "sparse": [], "soft_cap": 0.0, "alibi": None, "sinks": None}

    def put(position: int) -> None:
        case.kv.put(case.tables[0][position // 16] * 16 + position % 16, *rows[position])

    for position in range(80):
        put(position)
    sound = case.run(kernels)
    assert sound.isfinite().all()
    rows[41, 1, 0, 3], rows[70, 1, 0, 9] = torch.inf, torch.nan
    put(41)
    put(70)
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
    case = Case(3)
    case.size, case.heads, case.group, case.dim, case.dtype = 16, 2, 3, 64, torch.float32
    torch.manual_seed(0)
    case.kv_lens, case.q_lens = [2500, 1024, 1025, 2048], [1, 1, 1, 1]
    case.kv = Cache(random.Random(0), "hnd", kind, 420, 2, 16, 64)
    case.kv.scales = None
    case.kv.parts[0].view(torch.uint8).random_(0, 120)
    if kind in ("float32", "bfloat16"):
        case.kv.parts[0].copy_(torch.randn(420, 2, 2, 16, 64))
    if kind == "int8_paged":
        for side in range(2):
            case.kv.slot_scales(side).copy_(torch.rand(420, 2, 16) / 100)
    order = torch.randperm(420).tolist()
    case.tables = [[order.pop() for _ in range(-(-n // 16))] for n in case.kv_lens]
    case._take_dense()
    case.queries = torch.randn(4, 6, 64)
    case.options = {"scale": 0.3, "window": window, "sinks": torch.randn(6), "soft_cap": 0.0, "alibi": None}
    case.options |= {"scale": 0.3 if kind in ("float32", "bfloat16") else 0.01, "sparse": []}
    result = case.run(kernels)
    case.check(rounding, result)
    assert torch.equal(case.run(kernels, only=2), result[2:3])


def test_nan_within_reach_shows(kernels):
    """In keys and in values: a sequence must not say something sensible over broken memory."""
    for kind in (0, 1):
        kv = torch.randn(4, 1, 2, 16, 32)
        kv[2, 0, kind, 5] = float("nan")
        out = torch.empty(2, 2, 32)
        tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
        cu_q, lens = torch.tensor([0, 1, 2]).int(), torch.tensor([32, 32]).int()
        kernels.paged_attention(out, torch.randn(2, 2, 32), kv, cu_q, lens, tables, 0.2)
        assert out[0].isfinite().all() and out[1].isnan().all()
