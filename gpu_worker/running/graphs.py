"""Steps, captured once per padded batch size and replayed: one launch instead of hundreds.

Steps of decodes alone have graphs of their own (`DecodeGraphs`); other steps of few tokens have some if they are asked
for (`MixedGraphs`). A replay runs the captured operations on the captured addresses. So whatever differs from step to
step is a number in StepMemory, or in the plan that the ops keep in `TokenBatch.scratch`. All are
written in place before each replay.
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


def padded_sizes(max_sequences: int) -> tuple[int, ...]:
    """The batch sizes to capture: 1, 2, 4, 8, … and `max_sequences`."""
    sizes = [1]
    while sizes[-1] * 2 < max_sequences:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if max_sequences == 1 else (*sizes, max_sequences)


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


class DecodeGraphs:
    """The graphs of a decoder on the layers of one arena. Not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[Tensor],
        ops: CapturableOps,
        inputs: StepMemory,
        sizes: Sequence[int],
        capture: Capturer,
    ) -> None:
        """Captures a graph for each size, the largest first, so that the others fit into its memory.

        Capturing writes no block.
        """
        self.sizes = tuple(sorted(sizes))
        self._ops = ops
        self._inputs = inputs
        self._batches = {size: inputs.batch(size) for size in self.sizes}
        self._graphs: dict[int, StepFunction] = {}
        for size in reversed(self.sizes):
            batch = self._batches[size]

            def step(batch: TokenBatch = batch) -> Tensor:
                return decoder.logits(decoder.forward(batch, layers, batch.rows))

            self._graphs[size] = capture(step)

    @torch.inference_mode()
    def run(self, step: StepInput, tables: "Sequence[array[int]]") -> Tensor | None:
        """The logits of a step of decodes, one row for each chunk, whose blocks are in `tables`; valid until the next.

        None if it is not a step of decodes alone, or has too many or too long sequences.
        """
        num_rows = len(step.seats)
        if not 0 < num_rows == step.num_decodes <= self.sizes[-1] or not self._inputs.holds(step, num_rows):
            return None
        if step.scored:
            return None
        size = next(size for size in self.sizes if size >= num_rows)
        batch = self._batches[size]
        batch.kv_lens[:] = self._inputs.fill(step, tables, range(num_rows))[1][:size]
        self._ops.refill(batch)
        return self._graphs[size]()[:num_rows]


class MixedGraphs:
    """The graphs of steps of any chunks, with few tokens, on the layers of one arena. Not thread-safe."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[Tensor],
        ops: CapturableOps,
        inputs: StepMemory,
        capture: Capturer,
    ) -> None:
        """Captures a graph for each size, in tokens, the largest first. Capturing writes no block."""
        self.sizes = mixed_sizes(inputs.max_tokens)
        self._ops = ops
        self._inputs = inputs
        self._batches = {size: inputs.batch(size) for size in self.sizes}
        self._graphs: dict[int, StepFunction] = {}
        for size in reversed(self.sizes):
            batch = self._batches[size]

            def step(batch: TokenBatch = batch) -> Tensor:
                return decoder.logits(decoder.forward(batch, layers, batch.rows))

            self._graphs[size] = capture(step)

    @torch.inference_mode()
    def run(self, step: StepInput, tables: "Sequence[array[int]]", rows: Sequence[int]) -> Tensor | None:
        """The logits of a step, one row for each of the tokens `rows`, valid until the next step.

        None if the step scores tokens, or has too many tokens, or too many or too long sequences.
        """
        num_tokens = len(step.tokens)
        if not num_tokens or step.scored or not self._inputs.holds(step, len(rows)):
            return None
        size = next(size for size in self.sizes if size >= num_tokens)
        batch = self._batches[size]
        batch.q_lens[:], batch.kv_lens[:] = self._inputs.fill(step, tables, rows)
        self._ops.refill(batch)
        return self._graphs[size]()[: len(rows)]


def mixed_sizes(max_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to capture steps for: 16, 32, 64, … and `max_tokens`."""
    sizes = [LEAST_MIXED_TOKENS]
    while sizes[-1] * 2 < max_tokens:
        sizes.append(sizes[-1] * 2)
    return (max_tokens,) if max_tokens <= sizes[0] else (*sizes, max_tokens)


def capture_mixed(
    decoder: Decoder,
    layers: Sequence[Tensor],
    ops: Ops,
    max_sequences: int,
    max_tokens: int,
    context_tokens: int,
    device: torch.device,
    capture: Capturer,
) -> MixedGraphs | None:
    """Graphs for steps of up to `max_tokens` tokens. None where a step cannot be captured, as capture_decodes says."""
    if not isinstance(ops, CapturableOps) or not decoder.capturable or not ops.captures(layers[0]):
        return None
    block_size = layers[0].shape[3]
    tokens = min(max_tokens, MOST_MIXED_TOKENS)
    inputs = StepMemory(tokens, max_sequences, -(-context_tokens // block_size), block_size, device)
    try:
        with torch.inference_mode():
            return MixedGraphs(decoder, layers, ops, inputs, capture)
    except RuntimeError as error:
        log.warning("no CUDA graphs of mixed steps: capturing failed: %s", error)
        return None


def capture_decodes(
    decoder: Decoder,
    layers: Sequence[Tensor],
    ops: Ops,
    max_sequences: int,
    context_tokens: int,
    device: torch.device,
    capture: Capturer | None = None,
) -> DecodeGraphs | None:
    """Graphs for up to `max_sequences` decodes. None, with a line in the log, where a step cannot be captured."""
    if not isinstance(ops, CapturableOps) or not decoder.capturable or not ops.captures(layers[0]):
        what = decoder.name, ops.name, layers[0].dtype
        log.info("no CUDA graphs: %s and %s ops cannot be captured together, with a cache of %s", *what)
        return None
    block_size = layers[0].shape[3]
    inputs = StepMemory(
        *(max_sequences, max_sequences, -(-context_tokens // block_size), block_size, device), decodes=True
    )
    sizes = padded_sizes(max_sequences)
    try:
        with torch.inference_mode():
            return DecodeGraphs(decoder, layers, ops, inputs, sizes, capture or CudaGraphCapturer(device))
    except RuntimeError as error:  # CUDA's own errors are of this class
        log.warning("no CUDA graphs, which makes small batches slower: capturing failed: %s", error)
        return None
