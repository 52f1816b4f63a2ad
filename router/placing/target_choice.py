"""Which worker one running sequence should move to: a pure function, with the costs of placement.

In the place of tokens to compute stand tokens to copy: those of the blocks that the target has not cached. The target
has to have room, because nothing is preempted for a sequence that could stay where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from router.fleet.kv_index import HitCounts
from router.fleet.worker_view import SequenceView, WorkerSnapshot, WorkerView
from router.placing.placement import FREE_SHARE, NO_HITS, PlacementDecision, choose_worker

COPIED_TOKEN_COST = 0.25  # of a token whose block is copied, beside one that is computed


def choose_target(
    sequence: SequenceView, block_size: int, workers: Sequence[WorkerSnapshot], hits: Mapping[Incarnation, HitCounts]
) -> PlacementDecision:
    """Picks the worker that a sequence should move to, among others of its model, layout and class of numerics.

    `hits` says how many leading tokens of the sequence each worker has cached. The candidates of the decision say of
    every other worker why it was not picked.
    """
    views = [_judged_view(sequence, worker, hits.get(worker.view.incarnation, NO_HITS)) for worker in workers]
    return choose_cheapest(sequence, block_size, views, hits)


def choose_cheapest(
    sequence: SequenceView, block_size: int, targets: Sequence[WorkerView], hits: Mapping[Incarnation, HitCounts]
) -> PlacementDecision:
    """Picks the cheapest of those workers that are available. The sequence may go to each of these.

    Files count for nothing: what a target has not in memory is sent.
    """
    return choose_worker(
        sequence.num_tokens,
        {worker: found._replace(files=0) for worker, found in hits.items()},
        targets,
        held_tokens=sequence.num_blocks * block_size,
        token_cost=COPIED_TOKEN_COST,
        avoided=WorkerRole.PREFILL,
    )


def has_room(view: WorkerView, sequence: SequenceView, hits: HitCounts = NO_HITS) -> bool:
    """Whether the worker has a place in its batch for each branch, and blocks that no sequence uses.

    The prefix that is `hits` is in its cache. These blocks need no room, and cannot be evicted to make room.
    """
    if view.num_running + view.num_coming + sequence.num_branches > view.max_batch_sequences:
        return False
    num_hit = min(hits.device // view.block_size, sequence.num_blocks)
    num_needed = sequence.num_blocks - num_hit + sequence.num_branches  # each branch soon begins another block
    num_usable = view.num_free_blocks + max(0, view.num_cached_blocks - num_hit)
    return num_needed + FREE_SHARE * view.num_blocks <= num_usable


def has_any_room(view: WorkerView) -> bool:
    """Whether the worker could have room for a small sequence."""
    has_place = view.num_running + view.num_coming < view.max_batch_sequences
    return has_place and view.num_free_blocks + view.num_cached_blocks > FREE_SHARE * view.num_blocks


def _judged_view(sequence: SequenceView, worker: WorkerSnapshot, hits: HitCounts) -> WorkerView:
    """The worker's view; not available, with the reason, where the worker cannot be the target."""
    view, reason = worker.view, ""
    if not worker.alive:
        reason = "its lease has ended, or its reports do not come"
    elif worker.draining:
        reason = "draining"
    elif not has_room(view, sequence, hits):
        reason = "has no room in its batch or its memory"
    return replace(view, available=False, reason_unavailable=reason) if view.available and reason else view
