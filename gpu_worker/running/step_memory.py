"""The arrays of a step at addresses that never change, so that captured graphs read each step's numbers."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.upload import ArrayLayout, staging
from gpu_worker.steps.step_input import StepInput, ints


class StepMemory:
    """Room for `max_tokens` tokens of `max_sequences` sequences of up to `table_width` blocks, on the host and, after
    `fill`, on the device.

    `decodes`: every sequence has one token, also those that are not in a step. Otherwise those have none. Tokens past
    those of the step are stored nowhere, and see no keys.
    """

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        table_width: int,
        block_size: int,
        device: torch.device,
        *,
        decodes: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self._most_keys = table_width * block_size
        self._width = table_width
        self._decodes = decodes
        self.kind = "decodes" if decodes else "mixed steps"  # for logs
        token, sequence = ((max_tokens,), torch.int64), ((max_sequences,), torch.int32)
        self._layout = ArrayLayout(
            [
                *(token, token, token, ((max_sequences,), torch.int64), ((max_sequences + 1,), torch.int32), sequence),
                ((max_sequences, table_width), torch.int32),  # last: tables seldom change
            ]
        )
        self._host = staging(self._layout.num_bytes, device)
        self._there = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        views = [view.numpy() for view in self._layout.views(self._host)]
        self._ids, self._positions, self._slots, self._rows, self._cu_q, self._lens, self._tables = views
        self._kept: dict[int, array[int]] = {}  # the blocks in each row of the tables on the device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.fill(StepInput(0), [], [])

    def batch(self, size: int) -> TokenBatch:
        """The first `size` tokens, of all sequences or, with `decodes`, of the first `size` sequences.

        All batches made here share their memory, so `fill` changes each of them, but only one's lengths on the host.
        """
        ids, positions, slots, rows, cu_q, lens, tables = self._layout.views(self._there)
        count = size if self._decodes else self.max_sequences
        return TokenBatch(
            token_ids=ids[:size],
            positions=positions[:size],
            slots=slots[:size],
            rows=rows[:count],
            cu_q=cu_q[: count + 1],
            seq_lens=lens[:count],
            block_tables=tables[:count],
            q_lens=[int(self._decodes)] * count,
            kv_lens=[0] * count,
            room=0 if self._decodes else size,
        )

    def holds(self, step: StepInput, num_rows: int) -> bool:
        """Whether there is room for the step, with so many rows of logits, and, with `decodes`, it has nothing else."""
        return (
            0 < max(len(step.seats), num_rows) <= self.max_sequences
            and len(step.tokens) <= self.max_tokens
            and max(step.ends) <= self._most_keys
            and (not self._decodes or len(step.seats) == step.num_decodes)
        )

    def fill(
        self, step: StepInput, tables: "Sequence[array[int]]", rows: Sequence[int], batch: TokenBatch | None = None
    ) -> None:
        """Makes sequence i the inputs of chunk i, whose blocks are tables[i], and empties the other ones.

        `rows`: the tokens that logits are wanted for. `batch` is told the lengths. Queues one copy to the device.
        """
        if self._copied is not None:
            self._copied.synchronize()  # waits for the last step's copy, which has ended long ago
        used, count = len(step.tokens), len(step.seats)
        self._ids[:used], self._positions[:used], self._slots[:used] = step.tokens, step.positions, step.slots
        self._ids[used:], self._positions[used:], self._slots[used:] = 0, 0, -1
        self._lens[:count], self._lens[count:] = step.ends, 0
        self._rows[: len(rows)], self._rows[len(rows) :] = rows, 0
        lengths = np.full(self.max_sequences, int(self._decodes), dtype=np.int32)
        lengths[:count] = step.lengths
        self._cu_q[0] = 0
        np.cumsum(lengths, out=self._cu_q[1:])
        changed: dict[int, array[int]] = {}
        for number, table in enumerate(tables):
            if self._kept.get(number) != table:
                self._tables[number, : len(table)] = table[: self._width]
                changed[number] = ints(table)
        num_bytes = self._layout.starts[-1] + 4 * (max(changed, default=-1) + 1) * self._width
        self._there[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._kept |= changed
        if batch is not None:
            count = len(batch.q_lens)
            batch.q_lens[:], batch.kv_lens[:] = lengths[:count].tolist(), self._lens[:count].tolist()
