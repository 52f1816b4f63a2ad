"""The inputs of a step of decodes, at addresses that never change, so that captured graphs read each step's numbers."""

from collections.abc import Sequence

import torch

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.upload import ArrayLayout, staging
from gpu_worker.scheduling.state.step import Chunk
from octavo.request.ids import BlockId


class DecodeInputs:
    """Rows for up to `max_rows` sequences of up to `table_width` blocks, on the host and, after `fill`, on the device.

    A row without a sequence has no keys and stores none, so it touches no block.
    """

    def __init__(self, max_rows: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.table_width = table_width
        self._block_size = block_size
        row = ((max_rows,), torch.int64)
        tables = ((max_rows, table_width), torch.int32)
        self._layout = ArrayLayout(
            [row, row, row, ((max_rows,), torch.int32), tables]
        )  # tables last: they seldom change
        self._host = staging(self._layout.num_bytes, device)
        self._there = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        ids, positions, slots, lens, table_rows = (view.numpy() for view in self._layout.views(self._host))
        self._ids, self._positions, self._slots, self._lens, self._tables = ids, positions, slots, lens, table_rows
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._cu_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._kept: dict[int, list[BlockId]] = {}  # the blocks in each row of the tables on the device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.fill([])

    def batch(self, num_rows: int) -> TokenBatch:
        """The first `num_rows` rows. All batches made here share their memory, so `fill` changes each of them."""
        ids, positions, slots, lens, tables = self._layout.views(self._there)
        return TokenBatch(
            token_ids=ids[:num_rows],
            positions=positions[:num_rows],
            slots=slots[:num_rows],
            rows=self._rows[:num_rows],
            cu_q=self._cu_q[: num_rows + 1],
            seq_lens=lens[:num_rows],
            block_tables=tables[:num_rows],
            q_lens=[1] * num_rows,
            kv_lens=[0] * num_rows,
        )

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the chunks are decodes that fit into the rows and tables."""
        most = self.table_width * self._block_size
        return len(chunks) <= self.max_rows and all(chunk.length == 1 and chunk.start < most for chunk in chunks)

    def fill(self, chunks: Sequence[Chunk]) -> list[int]:
        """Makes row i the inputs of chunk i and empties the other rows. Returns how many keys each row has.

        Queues one copy to the device.
        """
        if self._copied is not None:
            self._copied.synchronize()  # waits for the last step's copy, which has ended long ago
        used, size = len(chunks), self._block_size
        self._ids[used:], self._positions[used:], self._slots[used:], self._lens[used:] = 0, 0, -1, 0
        changed: dict[int, list[BlockId]] = {}
        for row, chunk in enumerate(chunks):
            start, blocks = chunk.start, chunk.branch.blocks
            last = start // size
            self._ids[row] = chunk.branch.tokens[start]
            self._positions[row] = start
            self._slots[row] = blocks[last] * size + start % size
            self._lens[row] = start + 1
            table = [*blocks[: last + 1]]
            if table != self._kept.get(row):
                self._tables[row, : last + 1] = table
                changed[row] = table
        self._copy(max(changed, default=-1) + 1)
        self._kept |= changed
        lens: list[int] = self._lens.tolist()
        return lens

    def _copy(self, num_tables: int) -> None:
        """Copies everything before the tables, and the first `num_tables` tables, to the device."""
        end = self._layout.starts[-1] + 4 * num_tables * self.table_width
        self._there[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
