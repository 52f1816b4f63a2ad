"""From which other worker may the chosen one get blocks of a prompt? A pure function of what routers know."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from octavo.request.ids import Incarnation
from router.fleet.kv_index import HitCounts
from router.fleet.worker_view import WorkerView
from router.placing.placement import NO_HITS

MIN_BLOCKS = 4  # fewer are computed at once: a fetch takes a call, and a step of two workers


class PrefixHint(NamedTuple):
    """A worker that has more of a prompt than the one that is to run it."""

    owner: Incarnation
    num_tokens: int  # leading tokens of the prompt on its device


def find_prefix_owner(
    chosen: WorkerView, num_prompt: int, hits: Mapping[Incarnation, HitCounts], workers: Iterable[WorkerView]
) -> PrefixHint | None:
    """The worker of the same class with the most of the prompt on its device; of equal ones the least busy.

    It may drain: its blocks are the ones that will be gone.

    None if the chosen worker lacks fewer than MIN_BLOCKS of these blocks, on its device and in its host pool together.
    Whether a copy is faster than computing is for the chosen worker to say, which has measured both.
    """
    size = chosen.block_size
    usable = (num_prompt - 1) // size * size  # the last token is computed in any case

    def offered(view: WorkerView) -> int:
        return min(hits.get(view.incarnation, NO_HITS)[0], usable)

    there = [view for view in workers if view.available or view.draining]
    others = [v for v in there if v.incarnation != chosen.incarnation and v.numerics == chosen.numerics]
    best = min(others, key=lambda view: (-offered(view), view.load_cost, view.worker_id), default=None)
    if best is None or offered(best) - sum(hits.get(chosen.incarnation, NO_HITS)) < MIN_BLOCKS * size:
        return None
    return PrefixHint(best.incarnation, offered(best))
