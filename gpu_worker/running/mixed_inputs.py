"""The inputs of a step of any chunks, at addresses that never change, where captured graphs read each step's."""

from collections.abc import Sequence

import torch

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.upload import ArrayLayout, staging
from gpu_worker.scheduling.state.step import Chunk
from octavo.request.ids import BlockId


class MixedInputs:
    """Room for `max_tokens` tokens of `max_sequences` sequences of up to `table_width` blocks, on the host and, after
    `fill`, on the device.

    Tokens past those of the step belong to no sequence and are stored nowhere.
    """

    def __init__(
        self, max_tokens: int, max_sequences: int, table_width: int, block_size: int, device: torch.device
    ) -> None:
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self._most_keys = table_width * block_size
        self._width = table_width
        self._block_size = block_size
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
        self._kept: dict[int, list[BlockId]] = {}  # the blocks in each row of the tables on the device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.fill([], [])

    def batch(self, num_tokens: int) -> TokenBatch:
        """All sequences, and the first `num_tokens` tokens. All batches made here share their memory, so `fill` changes
        each of them; whoever runs one writes the lengths that `fill` returns into its q_lens and kv_lens."""
        ids, positions, slots, rows, cu_q, lens, tables = self._layout.views(self._there)
        return TokenBatch(
            token_ids=ids[:num_tokens],
            positions=positions[:num_tokens],
            slots=slots[:num_tokens],
            rows=rows,
            cu_q=cu_q,
            seq_lens=lens,
            block_tables=tables,
            q_lens=[0] * self.max_sequences,
            kv_lens=[0] * self.max_sequences,
            room=num_tokens,
        )

    def holds(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> bool:
        """Whether there is room for the chunks, and for so many rows of logits."""
        return (
            max(len(chunks), len(rows)) <= self.max_sequences
            and sum(chunk.length for chunk in chunks) <= self.max_tokens
            and all(chunk.start + chunk.length <= self._most_keys for chunk in chunks)
        )

    def fill(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Makes sequence i the inputs of chunk i and empties the other ones. `rows`: the tokens that logits are wanted
        for. Returns how many tokens and how many keys each sequence has. Queues one copy to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # waits for the last step's copy, which has ended long ago
        size, token = self._block_size, 0
        changed: dict[int, list[BlockId]] = {}
        self._cu_q[:], self._lens[:], self._rows[:] = 0, 0, 0
        for number, chunk in enumerate(chunks):
            end, blocks = chunk.start + chunk.length, chunk.branch.blocks
            after = token + chunk.length
            self._ids[token:after] = chunk.branch.tokens[chunk.start : end]
            self._positions[token:after] = range(chunk.start, end)
            self._slots[token:after] = [blocks[p // size] * size + p % size for p in range(chunk.start, end)]
            self._cu_q[number + 1], self._lens[number] = after, end
            table = [*blocks[: (end - 1) // size + 1]]
            if table != self._kept.get(number):
                self._tables[number, : len(table)] = table
                changed[number] = table
            token = after
        self._cu_q[len(chunks) + 1 :] = token
        self._ids[token:], self._positions[token:], self._slots[token:] = 0, 0, -1
        self._rows[: len(rows)] = rows
        num_bytes = self._layout.starts[-1] + 4 * (max(changed, default=-1) + 1) * self._width
        self._there[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._kept |= changed
        num_queries = [chunk.length for chunk in chunks] + [0] * (self.max_sequences - len(chunks))
        return num_queries, self._lens.tolist()
