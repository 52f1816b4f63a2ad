"""What a step runs (`StepPlan`), what it brings (`StepOutput`, `StepItems`), and what a runner is (`Runner`).

ModelRunner, FakeRunner and WitnessRunner run plans; nothing else touches the device.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NewType, Protocol

from gpu_worker.scheduling.state.sequence import Branch, Sequence
from octavo.request.ids import BlockId, HostBlockId
from octavo.request.sampling import TokenScore
from octavo.request.step_item import StepItem


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens [start, start + length) of a branch, which this step runs; their slots are in branch.blocks.

    `samples` are the branches that get a next token from the chunk's last row: none for a part of a prompt, usually the
    branch itself, and all branches of a sequence when their common prompt is complete (they fork after the step).
    """

    branch: Branch
    start: int
    length: int
    samples: tuple[Branch, ...] = ()
    # Score positions [score_from, score_end) of the branch: the log probability of each token given those before it,
    # for prompt_logprobs and for cumulative_logprob after a replay. -1: none. Position p needs row p - 1, which is in
    # this chunk: score_from > start.
    score_from: int = -1

    @property
    def score_end(self) -> int:
        """One past the last position to score: the chunk's last row scores the token after it, if that is known."""
        return min(self.start + self.length + 1, len(self.branch.tokens))


@dataclass(slots=True, eq=False)
class StepPlan:
    """What a runner does, in this order: swap out, poison, swap in, copy, demote, run the chunks (decodes come first).

    The next plan uses the chunk objects of decodes again, so they are valid until the step's commit.
    """

    step_id: int
    chunks: list[Chunk] = field(default_factory=list)
    swap_out: list[tuple[BlockId, HostBlockId]] = field(default_factory=list)
    swap_in: list[tuple[HostBlockId, BlockId]] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)  # copy on write: (from, to)
    # Copies of idle blocks to the host pool, ahead of their eviction. No step has to wait for them.
    demotions: list[tuple[BlockId, HostBlockId]] = field(default_factory=list)
    num_tokens: int = 0
    num_branches: int = 0  # rows that sample, at most SchedulerConfig.max_batch_sequences
    num_decodes: int = 0  # leading chunks with length 1 and one sample, the branch itself
    poison: list[BlockId] = field(default_factory=list)  # debug: freed blocks to be filled with NaN
    timed: bool = False  # the runner waits for the swaps, and says how long they took

    @property
    def empty(self) -> bool:
        return not (self.chunks or self.swap_out or self.swap_in or self.copies)

    @property
    def touches_other_blocks(self) -> bool:
        """Whether the runner reads or writes blocks that are in no table of a branch any more, or not yet."""
        return bool(self.swap_out or self.swap_in or self.copies or self.demotions or self.poison)


BAD_LOGITS = -1


@dataclass(slots=True, eq=False)
class StepOutput:
    """What the runner returns for a plan.

    `token_ids` has an entry per sampled branch, in the order of plan.chunks and chunk.samples. BAD_LOGITS marks one
    whose logits were not finite. `scores` (by place in token_ids) has an entry for each branch whose parameters ask for
    logprobs, are ranked, or search beams; for a beam, `top` holds 2 * beam_width candidates. `scored` (by place in
    plan.chunks) holds what score_from asked for.
    """

    token_ids: list[int]
    scores: dict[int, TokenScore] = field(default_factory=dict)
    scored: dict[int, list[TokenScore]] = field(default_factory=dict)
    copy_s: float = 0.0  # how long the swaps took; 0 if that was not measured
    demote_s: float = 0.0  # how long the step waited for its demotions; 0 if they run beside it
    is_copying: bool = False  # whether some copies were still under way when the step had run


@dataclass(frozen=True, slots=True, eq=False)
class BeamProgress:
    """How many tokens the beams of a search have by now: none of them is in an item before the search ends."""

    sequence: Sequence
    num_tokens: int


SwapOperation = Literal["out", "in", "drop"]


@dataclass(frozen=True, slots=True)
class SwapAnswer:
    """What a swap on request did: the answer to one item of the call."""

    num_blocks: int  # of the sequence, which moved or were given back; 0 if they were there already
    num_bytes: int = 0  # copied: not what the prefix cache still had, nor what was dropped
    copy_s: float = 0.0  # how long the copies took


SubscriptionId = NewType("SubscriptionId", int)  # of one open Step stream, within this process


@dataclass(slots=True, eq=False)
class StepItems:
    """What a step that is over added to branches, in the order it happened. It is not the wire's `StepResult`."""

    step_id: int
    items: list[StepItem] = field(default_factory=list)
    num_branches: int = 0
    num_tokens: int = 0
    granted_by: SubscriptionId | None = None  # whose finite grant the step used up; None: an unlimited grant
    progress: list[BeamProgress] = field(default_factory=list)  # of searches, now and then


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerInfo:
    """What the rest of the worker needs to know about a runner's model and memory."""

    model: str  # name that requests use
    fingerprint: str  # of weights, tokenizer, configuration
    layout: str  # fingerprint of a block's layout: dtype, shape, order
    numerics: str = ""  # by what its bits may differ from those of another worker of this model; empty: by nothing
    kv_dtype: str
    device: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    # How many tokens a query sees at most, its own included, in whatever layer. 0: in some layer it sees all.
    window: int = 0
    tokenizer: str  # what octavo.text.tokenizer.open_tokenizer takes: a path, or empty if there is none
    # What the model recommends, by field of SamplingParams.
    sampling_defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def window_blocks(self) -> int:
        """How many full blocks before its own a token may see, if every layer has a window; at least one. 0: all."""
        return max(1, -(-(self.window - 1) // self.block_size)) if self.window else 0

    @property
    def max_sequence_blocks(self) -> int:
        """How many blocks suffice for one branch of any length, alone, if every layer has a window. 0: no number."""
        return self.window_blocks + 1 if self.window else 0


class BlockMemory(Protocol):
    """The bytes of a runner's blocks, for a connection to another worker. Any thread may call it.

    Who calls makes sure that no step writes a block that is read here, and that none reads a block before it is kept.
    """

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def blocks_per_turn(self) -> int:
        """How many blocks `read_blocks` may be asked for at once."""
        ...

    def read_blocks(self, blocks: SequenceOf[int]) -> AbstractContextManager[Iterator[SequenceOf[memoryview]]]:
        """For each block runs of memory that are, one after another, its bytes. They are valid inside the context."""
        ...

    def open_block(self, block: int) -> SequenceOf[memoryview]:
        """Runs of memory in which the bytes of a block are to be written, one after another."""
        ...

    def keep_block(self, block: int) -> None:
        """Says that all bytes have been written. When it returns, steps that begin later can use the block."""
        ...

    def close_block(self, block: int) -> None:
        """Says that the runs are not written any more. Called once for each `open_block`."""
        ...


class Runner(Protocol):
    """Runs plans. It is not thread-safe: the engine's thread is its only caller, but for `block_memory`."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def block_memory(self) -> BlockMemory:
        """The bytes of the blocks on the device."""
        ...

    def run(self, plan: StepPlan) -> StepOutput: ...

    def check_device(self) -> None:
        """Raises an error if the device can compute nothing any more. Called after a step that failed."""
        ...

    def close(self) -> None: ...
