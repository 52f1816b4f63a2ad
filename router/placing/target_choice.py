"""Which worker one running sequence should move to: a pure function, with the costs of placement.

In the place of tokens to compute stand tokens to copy: those of the blocks that the target has not cached. The target
has to have room, because nothing is preempted for a sequence that could stay where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from router.fleet.kv_index import HitCounts
from router.fleet.worker_snapshot import SequenceView, WorkerSnapshot
from router.fleet.worker_view import WorkerView
from router.placing.placement import FREE_SHARE, NO_HITS, PlacementDecision, choose_worker

COPIED_TOKEN_COST = 0.25  # of a token whose block is copied, beside one that is computed


def choose_target(
    sequence: SequenceView,
    source: WorkerSnapshot,
    workers: Sequence[WorkerSnapshot],
    hits: Mapping[Incarnation, HitCounts],
) -> PlacementDecision:
    """Picks the worker that a sequence of `source` should move to. No worker is picked if the sequence cannot move.

    `hits` says how many leading tokens of the sequence each worker has cached. The candidates of the decision say of
    every other worker why it was not picked.
    """
    views = [_judged_view(sequence, source, worker, hits) for worker in workers]
    return choose_cheapest(sequence, source.view.block_size, views, hits)


def choose_cheapest(
    sequence: SequenceView, block_size: int, targets: Sequence[WorkerView], hits: Mapping[Incarnation, HitCounts]
) -> PlacementDecision:
    """Picks the cheapest of those workers that are available. The sequence may go to each of these."""
    held_tokens = sequence.num_blocks * block_size
    return choose_worker(
        sequence.num_tokens,
        hits,
        targets,
        held_tokens=held_tokens,
        token_cost=COPIED_TOKEN_COST,
        avoided=WorkerRole.PREFILL,
    )


def has_room(view: WorkerView, sequence: SequenceView, hits: HitCounts = NO_HITS) -> bool:
    """Whether the worker has a place in its batch for each branch, and blocks that no sequence uses.

    The prefix that is `hits` is in its cache. These blocks need no room, and cannot be evicted to make room.
    """
    if view.num_running + view.num_coming + sequence.num_branches > view.max_batch_sequences:
        return False
    num_hit = min(hits[0] // view.block_size, sequence.num_blocks)
    num_needed = sequence.num_blocks - num_hit + sequence.num_branches  # each branch soon begins another block
    num_usable = view.num_free_blocks + max(0, view.num_cached_blocks - num_hit)
    return num_needed + FREE_SHARE * view.num_blocks <= num_usable


def has_any_room(view: WorkerView) -> bool:
    """Whether the worker could have room for a small sequence."""
    has_place = view.num_running + view.num_coming < view.max_batch_sequences
    return has_place and view.num_free_blocks + view.num_cached_blocks > FREE_SHARE * view.num_blocks


def _judged_view(
    sequence: SequenceView, source: WorkerSnapshot, worker: WorkerSnapshot, hits: Mapping[Incarnation, HitCounts]
) -> WorkerView:
    """The worker's view; not available, with the reason, where the worker cannot be the target."""
    view = worker.view
    if not view.available:
        return view
    reason = _hindrance(sequence, source, worker, hits.get(view.incarnation, NO_HITS))
    return replace(view, available=False, reason_unavailable=reason) if reason else view


def _hindrance(sequence: SequenceView, source: WorkerSnapshot, worker: WorkerSnapshot, hits: HitCounts) -> str:
    """Why the worker cannot be the target. Empty if it can."""
    if not sequence.can_move:
        return "the sequence cannot move: it is not prefilled, has beams or is a suspect"
    if worker.view.incarnation == source.view.incarnation:
        return "the sequence is there"
    if not worker.alive:
        return "its lease has ended, or its reports do not come"
    if worker.draining:
        return "draining"
    if (worker.model, worker.layout) != (source.model, source.layout):
        return "has another model or layout"
    if worker.view.numerics != source.view.numerics:
        return "computes other bits"
    if worker.has_trial:
        return "has the trial of a suspect"
    if not has_room(worker.view, sequence, hits):
        return "has no room in its batch or its memory"
    return ""
