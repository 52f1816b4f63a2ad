"""Steps, captured once per padded batch size and replayed: one launch instead of hundreds.

Steps of decodes alone have graphs of their own; other steps of few tokens have some if they are asked for. A replay
runs the captured operations on the captured addresses. So whatever differs from step to step is a number in StepMemory,
or in the plan that the ops keep in `TokenBatch.scratch`. All are written in place before each replay.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import Decoder
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.running.step_memory import StepMemory
from gpu_worker.steps.step_input import StepInput

log = logging.getLogger(__name__)

StepFunction = Callable[[], Tensor]
MOST_MIXED_TOKENS = 512  # in a longer step launches are few beside the work
LEAST_MIXED_TOKENS = 16
Capturer = Callable[[StepFunction], StepFunction]  # runs a step once; the function it returns repeats that run


@runtime_checkable
class CapturableOps(Ops, Protocol):
    """Ops whose kernel launches depend on the lengths of a batch only through memory."""

    def captures(self, kv: Tensor) -> bool:
        """Whether a step on layers like `kv` can be captured."""
        ...

    def refill(self, batch: TokenBatch) -> None:
        """Works out batch.scratch again, in the same memory, from the q_lens and kv_lens that the batch has now.

        No length exceeds what block_tables has room for.
        """
        ...


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
        ops: CapturableOps,
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

        `tables` are the blocks of its chunks. None if the step scores tokens, or the memory does not hold it.
        """
        if step.scored or not self.memory.holds(step, len(rows)):
            return None
        batch = self._batches[next(size for size in self.sizes if size >= len(step.tokens))]
        self.memory.fill(step, tables, rows, batch)
        self._ops.refill(batch)
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
    if not isinstance(ops, CapturableOps) or not decoder.capturable or not ops.captures(layers[0]):
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
