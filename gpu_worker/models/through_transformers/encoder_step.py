"""Attention of a model with an encoder: of the encoder over its own tokens, and of a step of the decoder over pages.

Each token of the decoder sees the keys of all tokens that the encoder has read, and of the decoder's tokens up to its
own. It is computed alone, so its bits are the same in a piece of any size.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, Ops, TokenBatch, kv_format

ENCODER_TILE = 256  # tokens whose scores an encoder with biases makes at once
LEAST_DISTANCES = 512  # of which biases are made at once; always whole registers, so a distance has one bias


class PositionBias:
    """The biases of T5's scores, by head and by how far a key is from its query."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        """`compute` makes those of queries after so many tokens, and of all keys: [1, num_heads, queries, keys]."""
        self._compute = compute
        self._before: Tensor | None = None  # [num_heads, n]: of keys n - 1 … 0 tokens before the query

    def up_to(self, num_keys: int) -> Tensor:
        """[num_heads, num_keys], in float32: of a query and all keys before it, the farthest first; its own last."""
        table = self._before
        if table is None or table.shape[1] < num_keys:
            size = LEAST_DISTANCES
            while size < num_keys:
                size *= 2
            table = self._before = self._compute(1, size, past_seen_tokens=size - 1)[0, :, 0].float().contiguous()
        return table[:, table.shape[1] - num_keys :]

    def by_distance(self, reach: int) -> Tensor:
        """[num_heads, 2 reach + 1], in float32: of keys that are so far after a query, from -reach to reach."""
        return self._compute(1, 2 * reach + 1, past_seen_tokens=reach)[0, :, 0].float().contiguous()

    def around(self, start: int, end: int, num_keys: int) -> Tensor:
        """[num_heads, end - start, num_keys]: of queries at these positions and of all keys, before them and after."""
        return self._compute(end - start, num_keys, past_seen_tokens=start)[0]


@dataclass(frozen=True, slots=True, eq=False)
class Role:
    """What a module attends to."""

    layer: int
    is_cross: bool
    bias: PositionBias | None


def with_biases(stack: Any) -> tuple[Any, list[Tensor | None]]:
    """An encoder or decoder whose modules have their roles, and what attention to its own tokens adds to scores by
    distances, layer by layer."""
    roles = [(each, getattr(each, "octavo_role", None)) for each in stack.modules()]
    own = [(each, role.bias) for each, role in roles if role is not None and not role.is_cross]
    return stack, [bias and bias.by_distance(int(each.relative_attention_max_distance)) for each, bias in own]


class Encoding:
    """One run of the encoder over the tokens of one sequence."""

    def __init__(self) -> None:
        self._masks: tuple[PositionBias, list[Tensor]] | None = None  # of layers with the same biases, by tiles

    def attend(self, role: Role, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[1, num_tokens, num_heads, head_dim]"""
        if role.bias is None:
            attended = functional.scaled_dot_product_attention(query, key, value, scale=scale)
            return attended.transpose(1, 2)
        num_tokens = query.shape[2]
        if self._masks is None or self._masks[0] is not role.bias:
            ends = [(start, min(start + ENCODER_TILE, num_tokens)) for start in range(0, num_tokens, ENCODER_TILE)]
            made = [role.bias.around(*each, num_tokens).to(query.dtype).contiguous()[None] for each in ends]
            self._masks = role.bias, made
        tiles = [
            functional.scaled_dot_product_attention(tile, key, value, attn_mask=mask, scale=scale)
            for tile, mask in zip(query.split(ENCODER_TILE, dim=2), self._masks[1], strict=True)
        ]
        return torch.cat(tiles, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class _Reach:
    """Tokens of the decoder that see equally many of the decoder's tokens, their own included."""

    rows: Tensor | slice
    num_keys: int
    batch: TokenBatch


class EncoderStep:
    """A step: which of its tokens the encoder has read, and what those of the decoder see.

    If it has no token of the encoder, or none of the decoder, the model gets one row for it, whose result is ignored.
    """

    has_programs = False  # whether the decoder's layers run as programs

    def __init__(
        self,
        ops: Ops,
        batch: TokenBatch,
        kv: Sequence[Tensor],
        rows: Tensor,
        options: dict[Any, AttentionOptions],
        filler: int,
    ) -> None:
        """`rows` are the tokens of the batch whose logits are wanted. ValueError unless they are the decoder's."""
        if batch.encoded is None:
            raise ValueError("the batch does not say what the encoder has read")
        self._ops, self._kv, self._options, self._batch = ops, kv, options, batch
        lengths = torch.tensor(batch.encoded.lengths)
        owners = torch.arange(len(batch.q_lens)).repeat_interleave(torch.tensor(batch.q_lens))
        is_decoded = batch.positions >= lengths[owners]
        encoded, decoded = (~is_decoded).nonzero()[:, 0], is_decoded.nonzero()[:, 0]
        self.num_encoded, self.num_decoded = len(encoded), len(decoded)
        if not bool(is_decoded[rows].all()) or self.num_encoded != len(batch.encoded.states):
            raise ValueError("logits of encoded tokens are wanted, or the encoder gave other rows than the step has")
        self.wanted = (is_decoded.cumsum(0) - 1)[rows]
        self.states, self._written = batch.encoded.states, _with_slots(batch, batch.slots[encoded])
        self.encoded_slots = self._written.slots
        if not self.num_encoded:
            self.states = self.states.new_zeros((1, self.states.shape[1]))
            self._written = _with_slots(batch, torch.tensor([-1]))
        owner = owners[decoded]
        self.token_ids, self.positions = batch.token_ids[decoded], (batch.positions - lengths[owners])[decoded]
        self._decoded = _with_slots(batch, batch.slots[decoded])
        if not self.num_decoded:
            self.token_ids, self.positions = torch.tensor([filler]), torch.tensor([0])
            return
        tables, last = batch.block_tables[owner], batch.positions[decoded]
        self._crossed = _single_rows(self._decoded, tables, lengths[owner])
        self._tables, self._lengths, self._last, self._owner = tables, lengths[owner].tolist(), last, owner
        self._starts = lengths

    def for_programs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The decoder's tokens as sequences that begin behind what the encoder has read, and each token as one that
        sees all of that. There is such a token."""
        ends = torch.bincount(self._owner, minlength=len(self._starts)).cumsum(0)
        own = {
            "cu_q": functional.pad(ends, (1, 0)).int(),
            "seq_lens": self._batch.seq_lens,
            "block_tables": self._batch.block_tables,
            "slots": self._decoded.slots,
            "starts": self._starts.int(),
        }
        crossed = self._crossed
        return own, {"cu_q": crossed.cu_q, "lens": crossed.seq_lens, "tables": crossed.block_tables}

    @functools.cached_property
    def _reaches(self) -> list[_Reach]:
        reach: dict[int, list[int]] = {}
        for row, num_before in enumerate(self.positions.tolist()):
            reach.setdefault(num_before + 1, []).append(row)
        tables, last = self._tables, self._last
        return [
            _Reach(rows := torch.tensor(which), num_keys, _single_rows(self._decoded, tables[rows], last[rows] + 1))
            for num_keys, which in reach.items()
        ]

    def attend(self, role: Role, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Writes keys and values; [num_tokens, num_heads, head_dim] of the decoder's tokens."""
        pages = self._kv[role.layer]
        if role.is_cross:
            if self.num_encoded:
                self._ops.cache_write(pages, keys, values, self._written)
            if not self.num_decoded:
                return torch.zeros_like(queries)
            return self._ops.paged_attention(queries.contiguous(), pages, self._crossed, self._option(scale, 0))
        if not self.num_decoded:
            return torch.zeros_like(queries)
        self._ops.cache_write(pages, keys, values, self._decoded)
        if role.bias is not None:
            return self._attend_biased(pages, queries, scale, role.bias)
        attended = torch.empty_like(queries)
        for reach in self._reaches:  # the window ends where the tokens of the encoder begin
            some = queries[reach.rows].contiguous()
            attended[reach.rows] = self._ops.paged_attention(
                some, pages, reach.batch, self._option(scale, reach.num_keys)
            )
        return attended

    def _option(self, scale: float, window: int) -> AttentionOptions:
        """One for each kind of layer, and as many for windows as outputs have lengths."""
        return self._options.setdefault((scale, window), AttentionOptions(scale, window))

    def _attend_biased(self, pages: Tensor, queries: Tensor, scale: float, bias: PositionBias) -> Tensor:
        """Each row by itself, of products and sums whose order depends on how many keys it sees and on nothing else."""
        attended, size, places = torch.empty_like(queries), pages.shape[3], self._last.tolist()
        heads = queries.float()
        row = 0
        while row < self.num_decoded:  # the rows of a sequence
            end = row + 1
            while end < self.num_decoded and self._owner[end] == self._owner[row]:
                end += 1
            first, last = self._lengths[row], places[end - 1]
            blocks = self._tables[row, first // size : last // size + 1].long()
            stored = kv_format.raw(pages).index_select(0, blocks).view(pages.dtype)
            dense = kv_format.decode(stored, queries.shape[-1], torch.float32)  # [blocks, heads, 2, size, head_dim]
            both = dense.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, first % size :]
            for each in range(row, end):
                num_keys = places[each] - first + 1
                keys, values = both[:, :, :num_keys]
                scores = (heads[each][:, None] * keys).sum(-1) * scale + bias.up_to(num_keys)
                weights = scores.softmax(-1)
                attended[each] = (weights[..., None] * values).sum(1)
            row = end
        return attended


def _with_slots(batch: TokenBatch, slots: Tensor) -> TokenBatch:
    """A batch to write keys and values with."""
    return replace(batch, slots=slots, scratch={})


def _single_rows(batch: TokenBatch, tables: Tensor, num_keys: Tensor) -> TokenBatch:
    """A batch in which each token is a sequence of its own, and sees the first keys of its table."""
    count = len(num_keys)
    return replace(
        batch,
        cu_q=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=num_keys.int(),
        block_tables=tables.contiguous(),
        q_lens=[1] * count,
        kv_lens=num_keys.tolist(),
        scratch={},
    )
