"""A worker at one moment, as placement weighs it."""

from dataclasses import dataclass, field

from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from octavo.store.calls import prompt_limit

BRANCH_TOKENS = 32  # what one branch in the batch costs a new sequence
OVERFLOW_TOKENS = 256  # what it costs a new sequence to wait for a branch to end, when the batch is full


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A snapshot of one worker: what the worker reported last, and what this router has dispatched since."""

    incarnation: Incarnation
    worker_id: str
    available: bool
    reason_unavailable: str  # empty if available
    queued_tokens: int  # prompt tokens that the worker reported as still to compute
    num_running: int  # branches in the worker's batch
    num_waiting: int  # sequences that are admitted and wait, or that are in host memory
    dispatched_tokens: int  # prompt tokens sent to the worker that no report can contain yet
    num_dispatched: int  # sequences sent to the worker that no report can contain yet
    num_free_blocks: int
    num_cached_blocks: int  # blocks that no sequence uses, but that hold a prefix
    num_blocks: int
    block_size: int
    max_batch_sequences: int
    context_tokens: int
    max_sequence_blocks: int = 0  # how many blocks suffice for one branch, however long it is; 0: no number does
    prefill_tokens_per_s: float = 0.0  # 0: not known yet
    recent_picks: int = 0
    role: WorkerRole = WorkerRole.BOTH
    draining: bool = False  # it is not available for this reason alone: it still gives its blocks to other workers
    numerics: str = ""  # its class of numerics: workers of equal classes compute equal bits
    stays: bool = (
        True  # it has said lately that it is there, and does not leave: it may be available soon, if it is not
    )
    # These follow from the fields above. They are computed once per view, because many placements read one view.
    num_coming: int = field(init=False)  # sequences on their way into the worker's batch
    load_cost: float = field(init=False)  # at the worker's own speed
    prompt_limit: int = field(init=False)  # prompts must be shorter

    def __post_init__(self) -> None:
        num_coming = self.num_waiting + self.num_dispatched
        num_branches = self.num_running + num_coming
        overflow = max(0, num_branches + 1 - self.max_batch_sequences)
        load = self.queued_tokens + self.dispatched_tokens + BRANCH_TOKENS * num_branches + OVERFLOW_TOKENS * overflow
        object.__setattr__(self, "num_coming", num_coming)
        object.__setattr__(self, "load_cost", float(load))
        limit = prompt_limit(self.context_tokens, self.block_size, self.num_blocks, self.max_sequence_blocks)
        object.__setattr__(self, "prompt_limit", limit)
