"""Steps of decodes alone, captured once per padded batch size and replayed: one launch instead of hundreds.

A replay runs the captured operations on the captured addresses. So whatever differs from step to step is a number in
DecodeInputs or in the plan that the ops keep in `TokenBatch.scratch`. Both are written in place before each replay.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.running.decode_inputs import DecodeInputs
from gpu_worker.scheduling.step import StepPlan

log = logging.getLogger(__name__)

StepFunction = Callable[[], Tensor]
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
        inputs: DecodeInputs,
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
        inputs.fill([])
        for size in reversed(self.sizes):
            batch = self._batches[size]

            def step(batch: TokenBatch = batch) -> Tensor:
                return decoder.logits(decoder.forward(batch, layers, batch.rows))

            self._graphs[size] = capture(step)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor | None:
        """The logits of a step of decodes, one row for each chunk, valid until the next step.

        None if the plan is not a step of decodes alone, or has too many or too long sequences.
        """
        num_rows = len(plan.chunks)
        if not 0 < num_rows == plan.num_decodes <= self.sizes[-1] or not self._inputs.holds(plan.chunks):
            return None
        if any(chunk.score_from >= 0 for chunk in plan.chunks):
            return None
        size = next(size for size in self.sizes if size >= num_rows)
        batch = self._batches[size]
        batch.kv_lens[:] = self._inputs.fill(plan.chunks)[:size]
        self._ops.refill(batch)
        return self._graphs[size]()[:num_rows]


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
    inputs = DecodeInputs(max_sequences, -(-context_tokens // block_size), block_size, device)
    sizes = padded_sizes(max_sequences)
    try:
        with torch.inference_mode():
            return DecodeGraphs(decoder, layers, ops, inputs, sizes, capture or CudaGraphCapturer(device))
    except RuntimeError as error:  # CUDA's own errors are of this class
        log.warning("no CUDA graphs, which makes small batches slower: capturing failed: %s", error)
        return None
