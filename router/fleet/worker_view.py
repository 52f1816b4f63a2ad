"""A worker at one moment, as placement weighs it, and with its sequences, as rebalancing does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, WorkerRole
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
    adapters: frozenset[str] = frozenset()  # the digests of the adapters that it has in memory
    stays: bool = True  # it has said lately that it is there, and does not leave: it may be available soon
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceView:
    """A snapshot of one sequence on a worker."""

    seq_id: SequenceId
    num_tokens: int  # prompt and longest branch
    expected_tokens: int  # steps until it ends, as far as that can be told: at most what is left of `max_tokens`
    num_blocks: int  # blocks that it uses
    num_own_blocks: int  # of these, blocks that no other sequence uses: they have room for others when it has left
    num_branches: int = 1  # branches that have not ended
    is_prefilled: bool = True  # all of its prompt is computed
    has_beams: bool = False
    is_suspect: bool = False
    last_moved_at: float = -inf  # when it came from another worker with its blocks, on the clock of `now`

    @property
    def can_move(self) -> bool:
        """Whether it can move with its blocks. One that cannot is computed again elsewhere, if it has to leave."""
        return self.is_prefilled and not (self.has_beams or self.is_suspect)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker of a fleet, with those of its sequences that are known."""

    view: WorkerView
    model: str  # the model's fingerprint
    layout: str
    sequences: Sequence[SequenceView] = ()
    alive: bool = True  # it has a lease, and its reports come
    draining: bool = False


def view_of_record(
    record: Record, block_size: int, *, has_beams: bool = False, last_moved_at: float = -inf
) -> SequenceView:
    """What a router can tell of a sequence that runs, by its record alone.

    A router does not know which blocks the sequence shares, nor whether it waits within its worker: all of its blocks
    count as its own, and it counts as one that runs.
    """
    running = [length for length, finish in zip(record.num_tokens, record.finishes, strict=True) if not finish]
    longest = max(record.num_tokens, default=0)
    num_blocks = record.prompt_len // block_size
    num_blocks += sum((record.prompt_len % block_size + length) // block_size + 1 for length in running)
    return SequenceView(
        seq_id=record.seq_id,
        num_tokens=record.prompt_len + longest,
        expected_tokens=max((record.max_tokens - length for length in running), default=0),
        num_blocks=num_blocks,
        num_own_blocks=num_blocks,
        num_branches=max(1, len(running)),
        is_prefilled=all(running),
        has_beams=has_beams,
        is_suspect=record.crashes > 0,
        last_moved_at=last_moved_at,
    )
