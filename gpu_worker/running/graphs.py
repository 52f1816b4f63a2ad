"""Steps, captured once per padded batch size and replayed: one launch instead of hundreds.

Steps of decodes alone have graphs of their own, and so have other steps of few tokens. A replay
runs the captured operations on the captured addresses. So whatever differs from step to step is a number in StepMemory,
or in the plan that the ops keep in `TokenBatch.scratch`. All are written in place before each replay.
"""

import logging
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.ops.batch import ArrayLayout, staging
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


log = logging.getLogger(__name__)

StepFunction = Callable[[], Tensor]
MOST_MIXED_TOKENS = 512  # in a longer step launches are few beside the work
LEAST_MIXED_TOKENS = 16
Capturer = Callable[[StepFunction], StepFunction]  # runs a step once; the function it returns repeats that run


def doubling(least: int, most: int) -> tuple[int, ...]:
    """The sizes to capture: `least`, and twice that, and so on, and `most`."""
    sizes = [least]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return (most,) if most <= least else (*sizes, most)


class CudaGraphCapturer:
    """Captures CUDA graphs on one device. They share their memory, because no two are replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: StepFunction) -> StepFunction:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):  # setting up libraries at first use must not be part of the graph
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepGraphs:
    """The graphs of a decoder on the layers of one arena, by the number of tokens. Not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[Tensor],
        ops: Ops,
        memory: StepMemory,
        sizes: Sequence[int],
        capture: Capturer,
    ) -> None:
        """Captures a graph for each size, the largest first, so that the others fit into its memory.

        Capturing writes no block.
        """
        self.sizes = tuple(sorted(sizes))
        self.memory = memory
        self._ops = ops
        self._batches = {size: memory.batch(size) for size in self.sizes}
        self._graphs: dict[int, StepFunction] = {}
        for size in reversed(self.sizes):
            batch = self._batches[size]

            def step(batch: TokenBatch = batch) -> Tensor:
                return decoder.logits(decoder.forward(batch, layers, batch.rows))

            self._graphs[size] = capture(step)

    @torch.inference_mode()
    def run(self, step: StepInput, tables: "Sequence[array[int]]", rows: Sequence[int]) -> Tensor | None:
        """The logits of a step, one row for each of the tokens `rows`, valid until the next step.

        `tables` are the blocks of its chunks. None if the step scores tokens, wants hidden
        states, or does not fit into the memory, or its attention's pieces not into that of the ops.
        """
        if step.scored or step.pooled or not self.memory.holds(step, len(rows)):
            return None
        batch = self._batches[next(size for size in self.sizes if size >= len(step.tokens))]
        self.memory.fill(step, tables, rows, batch)
        if not self._ops.refill(batch):
            return None
        return self._graphs[batch.num_tokens]()[: len(rows)]


def capture_graphs(
    decoder: Decoder,
    layers: Sequence[Tensor],
    ops: Ops,
    max_sequences: int,
    context_tokens: int,
    device: torch.device,
    capture: Capturer,
    mixed_tokens: int = 0,
) -> list[StepGraphs]:
    """Graphs for up to `max_sequences` decodes, and for any steps of up to `mixed_tokens` tokens, if that is not 0.

    None, with a line in the log, where steps cannot be captured.
    """
    if not decoder.capturable or not ops.captures(layers[0]):
        what = decoder.name, ops.name, layers[0].dtype
        log.info("no CUDA graphs: %s and %s ops cannot be captured together, with a cache of %s", *what)
        return []
    block_size = layers[0].shape[3]
    form = max_sequences, -(-context_tokens // block_size), block_size, device
    memories = [(1, StepMemory(max_sequences, *form, decodes=True))]
    if mixed_tokens:  # first, as the larger steps, so that the others fit into their memory
        memories.insert(0, (LEAST_MIXED_TOKENS, StepMemory(min(mixed_tokens, MOST_MIXED_TOKENS), *form)))
    found: list[StepGraphs] = []
    for least, memory in memories:
        try:
            with torch.inference_mode():
                sizes = doubling(least, memory.max_tokens)
                found.insert(0, StepGraphs(decoder, layers, ops, memory, sizes, capture))
        except RuntimeError as error:  # CUDA's own errors are of this class
            log.warning("no CUDA graphs, which makes small batches slower: capturing failed: %s", error)
    return found
