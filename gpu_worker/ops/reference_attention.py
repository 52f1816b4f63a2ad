"""Paged attention in plain torch: pages are gathered into dense keys and values, and the rest is ordinary attention.

Sequences with one query (decodes) of similar length are gathered together. A sequence with more queries (a chunk of a
prompt) is computed alone, in tiles of queries, so that masks stay small. The indices to gather depend on the step, not
on the layer, so they are worked out once and kept in TokenBatch.scratch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import kv_format
from gpu_worker.ops.batch import AttentionOptions, BlockSparsePattern, TokenBatch

QUERY_TILE = 512


@dataclass(slots=True, eq=False)
class _SequenceGroup:
    """Sequences with the same number of queries, padded to the same number of blocks."""

    tokens: Tensor  # int64 [num_sequences * num_queries]: their rows in the batch
    num_sequences: int
    num_queries: int
    num_keys: int  # of the longest sequence
    pages: Tensor  # int64 [num_sequences * num_kv_heads * num_blocks]: the pages of keys, when kv is pages of one head
    positions: Tensor  # int64 [num_sequences, num_queries]: positions of the queries
    distance: Tensor  # int64 [num_sequences, num_queries, num_keys]: query position - key position
    stale: tuple[Tensor, Tensor] | None  # indices (sequence, key) of gathered slots that hold no key of the sequence
    causal: bool  # query i sees exactly the keys 0 … i


def paged_attention(queries: Tensor, kv: Tensor, batch: TokenBatch, options: AttentionOptions) -> Tensor:
    key = ("groups", options.window, kv.shape[1:])
    groups = batch.scratch.get(key)
    if groups is None:
        groups = batch.scratch[key] = _make_groups(batch, kv, options.window)
    if len(groups) == 1 and groups[0].tokens.shape[0] == queries.shape[0]:
        return _attend_group(queries, kv, groups[0], options)
    result = torch.empty_like(queries)
    for group in groups:
        result[group.tokens] = _attend_group(queries[group.tokens], kv, group, options)
    return result


def _make_groups(batch: TokenBatch, kv: Tensor, window: int) -> list[_SequenceGroup]:
    """Groups of sequences, in batch order where possible. A sequence without queries is in no group."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, (num_queries, num_keys) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        if num_queries == 1:
            first = max(0, num_keys - window) if window else 0
            num_blocks = (num_keys - 1) // kv.shape[3] - first // kv.shape[3] + 1
            alike.setdefault((1, num_blocks.bit_length()), []).append(index)
        elif num_queries > 1:
            alike[(num_queries, -index)] = [index]
    return [_make_group(batch, kv, window, indices) for indices in alike.values()]


def _make_group(batch: TokenBatch, kv: Tensor, window: int, indices: list[int]) -> _SequenceGroup:
    block_size, device = kv.shape[3], kv.device
    rows = torch.tensor(indices, dtype=torch.int64, device=device)
    num_queries = batch.q_lens[indices[0]]
    tokens = batch.cu_q[rows].long()[:, None] + torch.arange(num_queries, device=device)
    num_keys = batch.seq_lens[rows].long()
    query_positions = (num_keys - num_queries)[:, None] + torch.arange(num_queries, device=device)

    # Blocks before every query's window are not gathered.
    first_block = (
        (query_positions[:, 0] - window + 1).clamp(min=0) // block_size if window else torch.zeros_like(num_keys)
    )
    num_blocks = (num_keys - 1) // block_size + 1 - first_block
    longest = int(num_blocks.max())
    places = torch.arange(longest, device=device)
    # The sequences of a group have num_blocks in [2^k, 2^(k+1)). Padding repeats the first block, which is full unless
    # every sequence has one block.
    places = torch.where(places < num_blocks[:, None], places, 0) + first_block[:, None]
    blocks = batch.block_tables[rows].long().gather(1, places)

    keys = torch.arange(longest * block_size, device=device)
    positions = keys + (first_block * block_size)[:, None]
    tail = (keys >= ((num_blocks - 1) * block_size)[:, None]) & (keys < (num_blocks * block_size)[:, None])
    stale = (tail & (positions >= num_keys[:, None])).nonzero()
    width = longest * block_size if len(indices) > 1 else int(num_keys[0] - first_block[0] * block_size)
    distance = query_positions[:, :, None] - positions[:, None, :width]
    return _SequenceGroup(
        tokens=tokens.flatten(),
        num_sequences=len(indices),
        num_queries=num_queries,
        num_keys=width,
        pages=_pages(blocks, kv),
        positions=query_positions,
        distance=distance,
        stale=(stale[:, 0], stale[:, 1]) if len(indices) > 1 and stale.shape[0] else None,
        causal=not window and len(indices) == 1 and num_queries == width,
    )


def _pages(blocks: Tensor, kv: Tensor) -> Tensor:
    heads = torch.arange(kv.shape[1], device=blocks.device)
    return (blocks[:, None, :] * kv.shape[1] * 2 + heads[:, None] * 2).flatten()


def _gather(kv: Tensor, pages: Tensor, group: _SequenceGroup, queries: Tensor) -> Tensor:
    """Keys (or values) [num_sequences, num_kv_heads, num_keys, head_dim] of a group, as numbers like the queries."""
    num_kv_heads, head_dim = kv.shape[1], queries.shape[-1]
    if kv.is_contiguous():
        of_one_head = kv_format.raw(kv).view(-1, *kv.shape[3:])  # [num_blocks * num_kv_heads * 2, block_size, width]
        stored = of_one_head.index_select(0, pages).view(kv.dtype)
    else:  # blocks have more room than these pages
        of_block = kv_format.raw(kv).flatten(1, 2)
        stored = of_block[pages // of_block.shape[1], pages % of_block.shape[1]].view(kv.dtype)
    dense = kv_format.decode(stored, head_dim, queries.dtype).view(group.num_sequences, num_kv_heads, -1, head_dim)
    if group.stale is not None:  # garbage must not reach the sum: 0 * NaN is NaN
        sequence, key = group.stale
        dense[sequence, :, key] = 0
    return dense[:, :, : group.num_keys]


def _attend_group(queries: Tensor, kv: Tensor, group: _SequenceGroup, options: AttentionOptions) -> Tensor:
    num_heads, head_dim = queries.shape[1:]
    keys = _gather(kv, group.pages, group, queries)
    values = _gather(kv, group.pages + 1, group, queries)
    heads = queries.view(group.num_sequences, group.num_queries, num_heads, head_dim).transpose(1, 2)
    plain = not options.soft_cap and options.sinks is None and options.alibi is None and options.sparse is None
    if group.causal and plain:
        result = functional.scaled_dot_product_attention(
            heads, keys, values, is_causal=True, scale=options.scale, enable_gqa=num_heads != keys.shape[1]
        )
        return result.transpose(1, 2).reshape(queries.shape)
    tiles = []
    for start in range(0, group.num_queries, QUERY_TILE):
        end = min(start + QUERY_TILE, group.num_queries)
        last = group.num_keys - (group.num_queries - end) if group.num_queries > 1 else group.num_keys
        distance = group.distance[:, start:end, :last]
        tile = heads[:, :, start:end], keys[:, :, :last], values[:, :, :last], distance, options
        tiles.append(_attend_plain(*tile) if plain else _attend_scores(*tile, group.positions[:, start:end]))
    result = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=2)
    return result.transpose(1, 2).reshape(queries.shape)


def _visible(distance: Tensor, window: int) -> Tensor:
    """Which keys a query sees: bool [num_sequences, num_queries, num_keys]."""
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def _sparsely_visible(
    sparse: BlockSparsePattern, positions: Tensor, distance: Tensor, heads: int, kv_heads: int
) -> Tensor:
    """Which keys a query of each head sees: bool [num_sequences, heads, num_queries, num_keys]."""
    head = torch.arange(heads, device=distance.device)
    offset = head * sparse.head_step if sparse.head_step >= 0 else head // (heads // kv_heads) * -sparse.head_step
    own = positions[:, :, None] // sparse.block_size
    block = (positions[:, :, None] - distance) // sparse.block_size
    strided = (block[:, None] + offset.view(-1, 1, 1) + 1) % sparse.vert_stride == 0
    return strided | (block > own - sparse.local_blocks)[:, None]


def _attend_plain(queries: Tensor, keys: Tensor, values: Tensor, distance: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of queries [n, num_heads, q, d] to keys [n, num_kv_heads, k, d], with nothing but a mask."""
    num_sequences, num_heads, num_queries, head_dim = queries.shape
    mask = None
    if num_queries > 1 or num_sequences > 1 or options.window:
        mask = _visible(distance, options.window)[:, None]
    if num_queries > 1:
        gqa = num_heads != keys.shape[1]
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=options.scale, enable_gqa=gqa
        )
    # One query for each sequence: heads that share keys take the place of queries, so that keys are read once.
    grouped = queries.reshape(num_sequences, keys.shape[1], -1, head_dim)
    result = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=options.scale)
    return result.reshape(queries.shape)


def _attend_scores(
    queries: Tensor, keys: Tensor, values: Tensor, distance: Tensor, options: AttentionOptions, positions: Tensor
) -> Tensor:
    """Attention with all options that change scores, in float32. `positions` are those of the queries."""
    num_sequences, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.reshape(num_sequences, num_kv_heads, -1, num_queries, head_dim).float()
    scores = grouped @ keys[:, :, None].float().transpose(-1, -2) * options.scale
    scores = scores.view(num_sequences, num_heads, num_queries, -1)
    if options.soft_cap:
        scores = torch.tanh(scores / options.soft_cap) * options.soft_cap
    if options.alibi is not None:
        scores = scores - options.alibi.view(-1, 1, 1) * distance[:, None]
    seen = _visible(distance, options.window)[:, None]
    if options.sparse is not None:
        seen = seen & _sparsely_visible(options.sparse, positions, distance, num_heads, num_kv_heads)
    scores = scores.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, -1, 1, 1).expand(num_sequences, -1, num_queries, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    grouped_weights = weights.view(num_sequences, num_kv_heads, -1, num_queries, weights.shape[-1])
    result = grouped_weights @ values[:, :, None].float()
    return result.view(queries.shape).to(queries.dtype)
