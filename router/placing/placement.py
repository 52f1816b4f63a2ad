"""Where a request should run: a pure function of snapshots, with one cost per worker, counted in tokens.

    prefill   prompt tokens left to compute, after credit for blocks the worker has
    load      tokens that go before: queued and in flight, and the batch it would join
    pressure  tokens that others would compute again because this request takes their blocks

The weights and the reasons for them are in docs/decisions/router.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from octavo.ids import Incarnation
from router.fleet.worker_view import WorkerView

HOST_CREDIT = 0.75  # of a token computed already: a block in the host pool has to be copied
EVICTED_SHARE = 0.25  # of evicted prefix tokens that somebody will want again
PREEMPTED_SHARE = 2.0  # tokens computed again per token of room that is missing
SLOW_RATIO = 2.0  # how much slower than the fastest a worker must be before its speed counts
FREE_SHARE = 0.02  # of a worker's blocks that must be free or evictable to take another request

NO_HITS: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """The score of one worker: octavo.v1.Candidate."""

    worker: WorkerView
    eligible: bool
    reason: str  # why not; empty if eligible
    device_hit_tokens: int
    host_hit_tokens: int
    prefill_cost: float
    load_cost: float
    pressure_cost: float
    total_cost: float

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @property
    def recent_picks(self) -> int:
        return self.worker.recent_picks


@dataclass(frozen=True)
class PlacementDecision:
    """The best worker for a prompt, and how every other one compares."""

    prompt_tokens: int
    hits: Mapping[Incarnation, tuple[int, int]]
    workers: Sequence[WorkerView]
    worker: WorkerView | None  # None: nobody can take it

    @cached_property
    def candidates(self) -> list[PlacementCandidate]:
        """All of them: the cheapest first, those that cannot take it last. Worked out when asked for."""
        slow = _fastest(self.workers) / SLOW_RATIO
        scored = [_candidate(view, self.prompt_tokens, self.hits, slow) for view in self.workers]
        return sorted(scored, key=lambda c: (not c.eligible, c.total_cost, c.recent_picks, c.worker_id))


def place(
    prompt_tokens: int, hits: Mapping[Incarnation, tuple[int, int]], workers: Sequence[WorkerView]
) -> PlacementDecision:
    """Picks the eligible worker of the lowest cost; equal ones by the fewest recent picks, then by name.

    `hits` says, by incarnation, how many leading prompt tokens are in a worker's device cache and its host pool.
    """
    slow = _fastest(workers) / SLOW_RATIO
    best: WorkerView | None = None
    lowest = inf
    for view in workers:
        if not view.available or prompt_tokens >= view.prompt_limit:
            continue
        if view.load_cost > lowest:
            continue  # more is ahead of it there than the best one costs in all
        on_device, in_host = hits.get(view.incarnation, NO_HITS)
        total = sum(_costs(view, prompt_tokens, on_device, in_host, slow))
        if total < lowest or (total == lowest and best is not None and _order(view) < _order(best)):
            best, lowest = view, total
    return PlacementDecision(prompt_tokens, hits, workers, best)


def _order(view: WorkerView) -> tuple[int, str]:
    return view.recent_picks, view.worker_id


def room(view: WorkerView) -> int:
    """How many more sequences the worker should be given now. What finds no room does better to stay in the shared
    queue, where it keeps its rank and can still go anywhere."""
    if not view.available:
        return 0
    rows = view.max_batch_sequences - view.num_running - view.num_coming
    places = min(rows, lookahead(view) - view.num_coming)
    if view.num_running + view.num_coming == 0:
        return max(1, places)  # whatever its blocks hold, nobody needs it more
    if view.num_free_blocks + view.num_cached_blocks <= FREE_SHARE * view.num_blocks:
        return 0
    return max(0, places)


def lookahead(view: WorkerView) -> int:
    """Sequences that may wait at a worker, so that its next step never starts short."""
    return max(2, view.max_batch_sequences // 4)


def _refusal(view: WorkerView, prompt_tokens: int) -> str:
    """Why the worker can never take the prompt; empty if it can."""
    if prompt_tokens < view.prompt_limit:
        return ""
    if prompt_tokens >= view.context_tokens:
        return f"prompt of {prompt_tokens} tokens leaves no room in its context of {view.context_tokens}"
    return f"prompt of {prompt_tokens} tokens does not fit its {view.num_blocks} blocks of {view.block_size}"


def _fastest(workers: Sequence[WorkerView]) -> float:
    return max([view.prefill_tokens_per_s for view in workers if view.available], default=0.0)


def _costs(
    view: WorkerView, prompt_tokens: int, on_device: int, in_host: int, slow: float
) -> tuple[float, float, float]:
    """Prefill, load and pressure. A worker slower than `slow` pays in proportion."""
    prefill = prompt_tokens - on_device - HOST_CREDIT * in_host
    if prefill < 1.0:
        prefill = 1.0  # one token is always computed
    load = view.load_cost
    if 0.0 < view.prefill_tokens_per_s < slow:
        factor = slow * SLOW_RATIO / view.prefill_tokens_per_s
        prefill, load = prefill * factor, load * factor
    num_needed = (prompt_tokens - on_device) // view.block_size + 1  # and the block its output begins in
    if num_needed <= view.num_free_blocks:
        return prefill, load, 0.0
    return prefill, load, _pressure(view, num_needed, on_device // view.block_size)


def _pressure(view: WorkerView, num_needed: int, num_hit: int) -> float:
    """Blocks that are hit may be among the cached ones; they are kept, so they cannot make room."""
    evictable = max(0, view.num_cached_blocks - num_hit)
    missing = num_needed - view.num_free_blocks
    evicted = min(missing, evictable)
    return view.block_size * (EVICTED_SHARE * evicted + PREEMPTED_SHARE * (missing - evicted))


def _candidate(
    view: WorkerView, prompt_tokens: int, hits: Mapping[Incarnation, tuple[int, int]], slow: float
) -> PlacementCandidate:
    on_device, in_host = hits.get(view.incarnation, NO_HITS)
    costs = _costs(view, prompt_tokens, on_device, in_host, slow)
    reason = _refusal(view, prompt_tokens) if view.available else view.reason_unavailable or "unavailable"
    return PlacementCandidate(view, not reason, reason, on_device, in_host, *costs, total_cost=sum(costs))
