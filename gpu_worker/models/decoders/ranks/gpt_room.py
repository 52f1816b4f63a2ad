"""The memory of all ranks of a GPT-like decoder on a host, in which they exchange activations and orders."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoders.gpt import GptConfig
from gpu_worker.models.decoders.ranks.order_room import batch_of, whole_lines
from gpu_worker.models.decoders.ranks.place import RankPlace, TeamBroken
from gpu_worker.ops import TokenBatch, native


class GptRoom:
    """How the ranks meet, the order of rank 0, and activations by name: tensors with the columns of all ranks."""

    def __init__(self, config: GptConfig, place: RankPlace, dtype: torch.dtype) -> None:
        extension: Any = native.load()
        self.logit_rows = extension.ORDER_ROWS  # at once
        hidden, tokens, plan_bytes = config.hidden_size, place.tokens, place.plan_bytes(config.context_tokens)
        widths = dict.fromkeys(("attended", "q_norm", "out", "down", "x"), hidden)
        widths |= {"k_norm": config.num_kv_heads * config.head_dim, "inner": config.intermediate_size}
        columns = {name: (tokens, width, dtype) for name, width in widths.items()}
        columns["hidden"] = (self.logit_rows, hidden, dtype)
        columns["logits"] = (self.logit_rows, config.vocab_size, torch.float32)
        sizes = {name: rows * width * dtype.itemsize for name, (rows, width, dtype) in columns.items()}
        start = extension.TEAM_BYTES + extension.TeamOrder.room_bytes(plan_bytes)
        room = sum(map(whole_lines, sizes.values()))
        self._memory = place.team_memory(start + room)  # kept: arrays of orders lie there
        self.team = place.team(self._memory)
        self.order = extension.TeamOrder(self.team, tokens, plan_bytes)
        self.columns: dict[str, Tensor] = {}
        for name, (rows, width, dtype) in columns.items():
            self.columns[name] = self._memory[start : start + sizes[name]].view(dtype).view(rows, width)
            start += whole_lines(sizes[name])

    def order_forward(self, batch: TokenBatch, rows: Tensor) -> None:
        self.order.order_forward(
            *(batch.token_ids, batch.positions, batch.slots, rows),
            *(batch.cu_q, batch.seq_lens, batch.block_tables),
        )

    def batch(self) -> TokenBatch:
        """Of an order of a step."""
        arrays = [torch.from_numpy(np.asarray(each)) for each in self.order.arrays()]
        return batch_of(arrays, arrays)

    def expect(self, whole: bool) -> None:
        """Raises TeamBroken unless a meeting, or what passes between hosts, has come to its end."""
        if not whole:
            raise TeamBroken(self.team.trouble)


def cut_batch(batch: TokenBatch, begin: int, end: int) -> TokenBatch:
    """Some tokens of a step. Earlier tokens of a sequence that is divided are in an earlier part."""
    starts = batch.cu_q.tolist()
    there = [s for s in range(len(starts) - 1) if starts[s] < end and starts[s + 1] > begin]
    first, last = there[0], there[-1] + 1
    cu_q = batch.cu_q[first : last + 1].clamp(begin, end) - begin
    seq_lens = batch.seq_lens[first:last] - (batch.cu_q[first + 1 : last + 1] - end).clamp(min=0)
    return TokenBatch(
        token_ids=batch.token_ids[begin:end],
        positions=batch.positions[begin:end],
        slots=batch.slots[begin:end],
        rows=batch.rows,
        cu_q=cu_q,
        seq_lens=seq_lens,
        block_tables=batch.block_tables[first:last],
        q_lens=cu_q.diff().tolist(),
        kv_lens=seq_lens.tolist(),
    )
