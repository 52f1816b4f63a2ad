"""Chooses the device, how much memory blocks may take there and on the host, and the steps by which that is measured.

A step's memory depends on how many tokens it has, how many rows of logits, and how long the sequences are; no one step
is the worst in all three. So there are three, and memory for blocks is what the most expensive of them leaves."""

import gc
from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from typing import Protocol

import torch

from gpu_worker.steps.step_input import KnownTokens, OpenedSeat, StepInput, TableChange, ints, longs
from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams


def worst_steps(
    max_tokens: int, max_sequences: int, context_tokens: int, block_size: int, vocab_size: int
) -> list[StepInput]:
    """Steps for a runner that has one block: all sequences keep their keys and values there, one over the other.

    They are: prompts of equal length; one prompt as long as possible beside prompts of one token; and decodes at the
    end of the context. All sequences sample, with scores, and each prompt is scored.
    """
    params = costliest_params(vocab_size)
    most = min(max_sequences, max_tokens)
    shapes = [[(0, length) for length in spread(max_tokens, most, context_tokens)]]
    shapes.append([(0, length) for length in pile_up(max_tokens, most, context_tokens)])
    shapes.append([(context_tokens - 1, context_tokens)] * most)
    return [_step(shape, block_size, vocab_size, params) for shape in shapes]


def costliest_params(vocab_size: int) -> SamplingParams:
    """Sampling parameters that need every buffer of a sampler, at its largest."""
    listed = tuple(range(min(limits.MAX_LISTED_TOKEN_IDS, vocab_size)))
    return SamplingParams(
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        best_of=2,  # ranked: the raw log probabilities are kept beside the adjusted ones
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=dict.fromkeys(listed[: limits.MAX_LOGIT_BIAS], 1.0),
        allowed_token_ids=listed,
        seed=0,
        max_tokens=1,
        logprobs=limits.MAX_LOGPROBS,
        prompt_logprobs=limits.MAX_LOGPROBS,
    )


def spread(max_tokens: int, num_sequences: int, context_tokens: int) -> list[int]:
    """The lengths of `num_sequences` prompts that have `max_tokens` together, or all that the context allows."""
    share, rest = divmod(max_tokens, num_sequences)
    return [min(share + (place < rest), context_tokens) for place in range(num_sequences)]


def pile_up(max_tokens: int, num_sequences: int, context_tokens: int) -> list[int]:
    """The lengths of `num_sequences` prompts that have `max_tokens` together, most of them in as few as possible.

    Each has at least one token, and at most as many as the context.
    """
    lengths, left = [], max_tokens
    for others in range(num_sequences - 1, -1, -1):
        lengths.append(min(left - others, context_tokens))
        left -= lengths[-1]
    return lengths


def _step(shape: list[tuple[int, int]], block_size: int, vocab_size: int, params: SamplingParams) -> StepInput:
    """A step that runs the tokens [start, end) of each of its sequences. Prompts are scored.

    The tokens are as different as possible, so that penalties concern as many as possible.
    """
    spans = [range(start, end) for start, end in shape]
    step = StepInput(0, seats=ints(range(len(spans))), lengths=ints(map(len, spans)), ends=ints(s.stop for s in spans))
    step.positions = longs(chain.from_iterable(spans))
    step.tokens = longs(position % vocab_size for position in step.positions)
    step.slots = longs(position % block_size for position in step.positions)
    for seat, span in enumerate(spans):
        known = longs(position % vocab_size for position in range(span.start))
        step.opened.append(OpenedSeat(seat, params, span.stop, known))
        step.tables.append(TableChange(seat, 0, ints([0] * -(-span.stop // block_size))))
        if len(span) > 1:
            step.scored.append(KnownTokens(seat, 1, longs(position % vocab_size for position in span[1:])))
    step.num_decodes = len(spans) if shape[0][0] else 0
    step.sample_tokens = ints(end - 1 for end in accumulate(step.lengths))
    step.sample_seats, step.sample_branches = step.seats, ints([0] * len(spans))
    return step


CPU_KV_BYTES = 1 << 30  # the default is at most this, and at most a quarter of the available memory
MAX_SWAP_BYTES = 4 << 30  # the default is at most this, and at most a tenth of the available memory


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one.

    The device of a GPU always has a number, so that it equals the device of a tensor there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device", f"{name!r} is not a device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument("device", f"{name!r}: only cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device", f"{name!r}: no CUDA device is usable here; try --device cpu")
    if device.type == "cuda" and ":" not in name:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class DeviceMemory(Protocol):
    """The memory of a device, as CudaMemory tells it."""

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def peak_of(self, work: Callable[[], object]) -> int: ...

    def kept_by(self, work: Callable[[], object]) -> int: ...


class CudaMemory:
    """What the driver and torch say of the memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free_bytes(self) -> int:
        """What no process has. Memory that torch keeps for later use counts as free."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, work: Callable[[], object]) -> int:
        """How many bytes `work` takes, at its highest, beside those that were in use before."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def kept_by(self, work: Callable[[], object]) -> int:
        """How many bytes the result of `work`, which is dropped, keeps by the driver's count: torch counts no graph."""
        before = self.free_bytes()
        result = work()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        after = int(torch.cuda.mem_get_info(self._device)[0])
        del result
        return max(0, before - after)


def gpu_block_bytes(
    memory: DeviceMemory, utilization: float, steps: Iterable[Callable[[], object]], capture: Callable[[], object]
) -> int:
    """How many bytes blocks may take on a GPU of which this worker may use the share `utilization`.

    It is what weights, the most expensive of `steps`, what `capture` keeps, and other processes leave of that share.
    Raises InvalidArgument if a step does not fit, or nothing is left.
    """
    try:
        activations = max((memory.peak_of(step) for step in steps), default=0)
        captured = memory.kept_by(capture)
    except torch.OutOfMemoryError as error:
        remedy = "lower it, --max-batch-sequences or --context-tokens"
        raise InvalidArgument(
            "max_batch_tokens", f"the largest step does not fit the GPU's memory: {remedy}"
        ) from error
    free, total = memory.free_bytes(), memory.total_bytes
    left = int(free - (1 - utilization) * total - activations - captured)
    if left <= 0:
        raise InvalidArgument(
            "gpu_memory_utilization",
            f"{utilization:g} of {_gib(total)} leaves nothing for blocks: {_gib(total - free)} are in use, a step "
            f"takes {_gib(activations)}, graphs take {_gib(captured)}. Give more, or less to --max-batch-tokens",
        )
    return left


def cpu_block_bytes(available: int) -> int:
    """How many bytes blocks take on a CPU with so much memory, unless the settings say. No step is measured there."""
    return min(CPU_KV_BYTES, available // 4)


def host_pool_bytes(available: int) -> int:
    """How many bytes of so much host memory blocks that are swapped out may take, unless the settings say."""
    return min(MAX_SWAP_BYTES, available // 10)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
