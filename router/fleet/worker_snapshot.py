"""A worker with its sequences at one moment, as rebalancing weighs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from octavo.request.ids import SequenceId
from octavo.request.record import Record
from router.fleet.worker_view import WorkerView


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
