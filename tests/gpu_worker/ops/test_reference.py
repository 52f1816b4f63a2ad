"""The reference ops, and those chosen for a CPU, against float64 arithmetic written out, over random shapes, with traps
where no op may look."""

import random

import pytest
import torch
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.ops import AttentionOptions, BlockSparsePattern, TokenBatch, choose_ops, make_batch
from gpu_worker.ops.reference import ReferenceOps

torch.set_num_threads(1)
CPU = torch.device("cpu")
each_ops = pytest.mark.parametrize("ops", [ReferenceOps(), choose_ops(CPU)], ids=["reference", "chosen"])


class Pages:
    """Random sequences in shuffled blocks; every slot without a key holds NaN, every table ends in garbage."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.block_size = size = rng.choice([8, 16, 32])
        self.num_kv_heads, self.group, self.head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([8, 64])
        self.kv_lens = [
            rng.choice([0, 1, size - 1, size, size + 1, rng.randint(1, 150)]) for _ in range(rng.randint(1, 6))
        ]
        self.q_lens = [min(n, rng.choice([1, 1, n, rng.randint(1, 150)])) for n in self.kv_lens]
        counts = [-(-n // size) for n in self.kv_lens]
        free = list(range(sum(counts) + 3))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        num_blocks = sum(counts) + 3
        self.kv = torch.full((num_blocks, self.num_kv_heads, 2, size, self.head_dim), float("nan"))
        self.dense = [torch.randn(2, n, self.num_kv_heads, self.head_dim) for n in self.kv_lens]
        for table, dense in zip(self.tables, self.dense, strict=True):
            for position in range(dense.shape[1]):
                block, place = table[position // size], position % size
                self.kv[block, :, 0, place], self.kv[block, :, 1, place] = dense[0, position], dense[1, position]
        self.garbage = [table + [rng.choice([-(2**31), 2**31 - 1, 10**6])] * rng.randint(0, 3) for table in self.tables]
        self.queries = torch.randn(sum(self.q_lens), self.num_kv_heads * self.group, self.head_dim)
        self.options = AttentionOptions(
            scale=rng.choice([0.3, self.head_dim**-0.5]),
            window=rng.choice([0, 0, 1, 5, size, 40]),
            soft_cap=rng.choice([0.0, 0.0, 2.0]),
            alibi=torch.rand(self.num_kv_heads * self.group) if rng.random() < 0.3 else None,
            sinks=torch.randn(self.num_kv_heads * self.group) if rng.random() < 0.3 else None,
            sparse=BlockSparsePattern(
                rng.randint(0, 2), rng.choice([2, 3]), rng.choice([5, 8, 16]), rng.choice([-1, 0, 1])
            )
            if rng.random() < 0.3
            else None,
        )

    def batch(self, tables: list[list[int]] | None = None) -> TokenBatch:
        num_tokens = sum(self.q_lens)
        nowhere = [-1] * num_tokens
        return make_batch(nowhere, nowhere, nowhere, self.q_lens, self.kv_lens, tables or self.garbage, CPU)

    def expected(self) -> torch.Tensor:
        """Attention as its definition says it, one query at a time, in float64."""
        rows = []
        for dense, q_len, kv_len in zip(self.dense, self.q_lens, self.kv_lens, strict=True):
            for position in range(kv_len - q_len, kv_len):
                rows.append(self._row(self.queries[len(rows)].double(), dense.double(), position))
        return torch.stack(rows) if rows else torch.empty(self.queries.shape, dtype=torch.float64)

    def _row(self, query: torch.Tensor, dense: torch.Tensor, position: int) -> torch.Tensor:
        options = self.options
        first = max(0, position - options.window + 1) if options.window else 0
        keys, values = dense[:, first : position + 1].repeat_interleave(self.group, dim=2)
        scores = torch.einsum("hd,khd->hk", query, keys) * options.scale
        if options.soft_cap:
            scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
        if options.alibi is not None:
            scores = scores + options.alibi.double()[:, None] * (torch.arange(first, position + 1) - position)
        weights = scores.exp() * self._seen(torch.arange(first, position + 1), position)
        total = weights.sum(1, keepdim=True)
        if options.sinks is not None:
            total = total + options.sinks.double().exp()[:, None]
        return torch.einsum("hk,khd->hd", (weights / total).nan_to_num(0), values)

    def _seen(self, keys: torch.Tensor, position: int) -> torch.Tensor:
        """Which keys block-sparse attention lets each head see."""
        sparse, rows = self.options.sparse, []
        for head in range(self.num_kv_heads * self.group):
            if sparse is None:
                rows.append(torch.ones(len(keys)))
                continue
            blocks, step = keys // sparse.block_size, sparse.head_step
            offset = head * step if step >= 0 else head // self.group * -step
            local = blocks > position // sparse.block_size - sparse.local_blocks
            rows.append((local | ((blocks + offset + 1) % sparse.vert_stride == 0)).double())
        return torch.stack(rows)


@each_ops
@settings(max_examples=draws(20, 80))
@given(seed=st.integers(0, 2**32 - 1))
def test_attention_is_its_definition(ops, seed):
    pages = Pages(seed)
    result = ops.paged_attention(pages.queries, pages.kv, pages.batch(), pages.options)
    torch.testing.assert_close(result.double(), pages.expected(), rtol=1e-4, atol=1e-5)


@each_ops
def test_long_chunks_are_tiled(ops):
    """More queries than a tile, behind a prefix, with and without a window."""
    torch.manual_seed(0)
    num_queries, num_keys, size = 1100, 1300, 16
    kv = torch.randn(82, 1, 2, size, 8)
    table = torch.randperm(82).tolist()
    queries = torch.randn(num_queries, 2, 8)
    ids = [0] * num_queries
    for window in (0, 100):
        batch = make_batch(ids, ids, ids, [num_queries], [num_keys], [table], CPU)
        result = ops.paged_attention(queries, kv, batch, AttentionOptions(scale=0.4, window=window))
        keys, values = kv[table].double().permute(2, 1, 0, 3, 4).reshape(2, 82 * size, 8)[:, :num_keys]
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        hidden = (distance < 0) | ((distance >= window) if window else False)
        scores = torch.einsum("qhd,kd->hqk", queries.double(), keys) * 0.4
        expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        torch.testing.assert_close(result.double(), expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


@each_ops
@settings(max_examples=30)
@given(data=st.data())
def test_keys_and_values_go_to_their_slots_and_nowhere_else(ops, data):
    num_blocks, heads, size, dim = 4, 2, 8, 4
    slots = data.draw(st.lists(st.integers(0, num_blocks * size - 1), unique=True, max_size=12))
    slots = [slot if data.draw(st.booleans()) else -1 for slot in slots]
    count = len(slots)
    before = torch.randn(num_blocks, heads, 2, size, dim)
    keys, values = torch.randn(2, count, heads, dim)
    batch = make_batch([0] * count, [0] * count, slots, [count], [count], [[0]], CPU)
    after = before.clone()
    ops.cache_write(after, keys, values, batch)
    for index, slot in enumerate(slots):
        if slot >= 0:
            before[slot // size, :, 0, slot % size] = keys[index]
            before[slot // size, :, 1, slot % size] = values[index]
    assert torch.equal(after, before)


@each_ops
def test_copies_read_before_they_write(ops):
    """Exchanging two blocks and spreading one: what counts is what was there before."""
    arena = torch.randn(3, 6, 1, 2, 8, 4)
    before = arena.clone()
    ops.copy_blocks(arena, [(0, 1), (1, 0), (2, 3), (2, 4)])
    assert torch.equal(arena, before[:, [1, 0, 2, 2, 2, 5]])


@each_ops
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_norms_activations_and_rotation(ops, dtype, tolerance):
    torch.manual_seed(1)
    x, weight = torch.randn(7, 32).to(dtype), torch.randn(32).to(dtype)
    wide = x.double()

    def close(result, expected):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)

    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(ops.rms_norm(x, weight, 1e-5), norm)
    gate, up = wide[:, :16], wide[:, 16:]
    close(ops.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)
    heads = x.view(7, 2, 16)
    for rotated in (16, 8):  # all dimensions of a head, and half of them
        angles = torch.arange(7)[:, None] * 0.37 ** torch.arange(rotated // 2)
        cos, sin = (torch.cat((part, part), dim=1).to(dtype) for part in (angles.cos(), angles.sin()))
        pairs = torch.complex(heads[..., : rotated // 2].double(), heads[..., rotated // 2 : rotated].double())
        turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
        expected = torch.cat((turned.real, turned.imag, heads[..., rotated:].double()), dim=-1)
        kv, given = torch.zeros(1, 2, 2, 8, 16, dtype=dtype), heads.clone()
        batch = make_batch([0] * 7, [*range(7)], [*range(7)], [7], [7], [[0]], CPU)
        close(ops.rotary_cache_write(kv, given.clone(), given, heads, cos, sin, batch), expected)
        close(kv[0, :, 0, :7].transpose(0, 1), expected)
        assert torch.equal(kv[0, :, 1, :7].transpose(0, 1), heads)


@each_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_not_rounded_to_the_type_of_the_weights(ops, dtype, biased):
    torch.manual_seed(3)
    hidden, head = torch.randn(3, 64).to(dtype), torch.randn(50, 64).to(dtype)
    bias = torch.randn(50).to(dtype) if biased else None
    exact = hidden.double() @ head.double().T + (0 if bias is None else bias.double())
    logits = ops.logits(hidden, head, bias)
    assert logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 1e-4, "in 16 bits it would be more than 1e-3"
