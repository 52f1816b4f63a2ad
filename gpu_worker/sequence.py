"""A sequence on this worker: what was asked, its branches, and which of their tokens are computed.

A branch's tokens are the prompt and then its output. For each branch, half-open intervals over token positions:

    [0, num_cached)               found in the prefix cache: shared, read-only
    [num_cached, num_computed)    keys and values written by earlier steps
    [num_computed, num_planned)   written by the step in flight; lost if that step fails
    [num_planned, len(tokens))    known, still to be run

A branch decodes when all but its last token are computed.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from octavo.ids import BlockHash, BlockId, HostBlockId, SequenceId
from octavo.sampling import FinishReason, SamplingParams


class BranchState(IntEnum):
    WAITING = 0  # has no blocks
    RUNNING = 1  # has blocks on the device
    SWAPPED = 2  # has blocks in the host pool
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Branch:
    """One stream of tokens of a sequence."""

    sequence: "Sequence"
    index: int
    tokens: list[int]  # prompt, then output
    num_prompt: int
    num_journalled_at_start: int = 0  # outputs that came with the admission: never sent again
    state: BranchState = BranchState.WAITING
    num_cached: int = 0
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    host_blocks: list[HostBlockId] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)  # of the full, hashed blocks, from the first on
    finish: FinishReason = FinishReason.NONE
    failure: str = ""  # JSON of octavo.errors.Failure, with FinishReason.ERROR
    cumulative_logprob: float = 0.0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


@dataclass(slots=True, eq=False)
class Sequence:
    """What one admission asked for."""

    seq_id: SequenceId
    epoch: int
    prompt: list[int]
    params: SamplingParams  # validated, the seed concrete, max_tokens concrete
    root: bytes  # key of its block hashes: model, layout, tenant salt
    priority: int = 3  # 1 system, 2 interactive, 3 default, 4 bulk: lower first
    deadline: float | None = None  # of the worker's monotonic clock
    arrival: float = 0.0
    alone: bool = False
    branches: list[Branch] = field(default_factory=list)
    num_preempted: int = 0
    last_preempted: float = float("-inf")

    @property
    def finished(self) -> bool:
        return all(branch.state == BranchState.FINISHED for branch in self.branches)
