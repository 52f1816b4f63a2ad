"""Which worker should run a sequence: a pure function of snapshots, with one cost per worker, counted in tokens.

    prefill   prompt tokens left to compute, after credit for the blocks that the worker has cached; for a sequence
              that moves with its blocks, a share of them: these tokens are copied
    load      tokens that are computed before: those queued and in flight, and the batch that the sequence would join
    pressure  tokens that other sequences would compute again, because this sequence takes their blocks

docs/decisions/router.md has the reasons for the weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from router.fleet.kv_index import HitCounts
from router.fleet.worker_view import WorkerView

HOST_CREDIT = 0.75  # of a token that is computed already: a block in the host pool has to be copied
FILE_CREDIT = 0.5  # of one in a file: it has to be read, and a worker does not wait for a disk that is slower than it
EVICTED_SHARE = 0.25  # of evicted prefix tokens that a later request will need again
PREEMPTION_FACTOR = 2.0  # tokens that are computed again per token of room that is missing
SLOW_RATIO = 2.0  # how much slower than the fastest worker a worker must be before its speed counts
KEPT_SHARE = 1 / 16  # of all places in batches may be kept for tenants that had less than their share
FREE_SHARE = 0.02  # of a worker's blocks that must be free or evictable before it gets another sequence

ADAPTER_TOKENS = 128.0  # what it costs a sequence that the worker has to read its adapter first

MIN_BLOCKS = 4  # of a prefix; fewer are computed at once: a fetch takes a call, and a step of two workers
NO_HITS = HitCounts(0)


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """The costs of one worker: octavo.v1.Candidate."""

    worker: WorkerView
    eligible: bool
    reason: str  # why the worker is not eligible; empty if it is
    device_hit_tokens: int
    host_hit_tokens: int  # in its host pool, or in files
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
    """The best worker for a prompt, and how every other worker compares. A replayed output counts as prompt."""

    num_tokens: int
    hits: Mapping[Incarnation, HitCounts]
    workers: Sequence[WorkerView]
    worker: WorkerView | None  # None: no worker can take the prompt
    held_tokens: int  # tokens that the worker gets to hold: more than `num_tokens` where a sequence has branches
    token_cost: float  # of a token that the worker has not cached: 1 if it is computed
    lora: str = ""  # the digest of its adapter
    avoided: WorkerRole | None = None  # workers of this role were not considered: there is another one

    @cached_property
    def candidates(self) -> list[PlacementCandidate]:
        """All workers: the cheapest first, those that are not eligible last. Computed when it is first read."""
        slow = slow_speed(self.workers)
        candidates = [_candidate(self, view, slow) for view in self.workers]
        return sorted(candidates, key=lambda c: (not c.eligible, c.total_cost, c.recent_picks, c.worker_id))


def choose_worker(
    num_tokens: int,
    hits: Mapping[Incarnation, HitCounts],
    workers: Sequence[WorkerView],
    *,
    held_tokens: int = 0,
    token_cost: float = 1.0,
    avoided: WorkerRole = WorkerRole.DECODE,
    lora: str = "",
) -> PlacementDecision:
    """Picks the eligible worker of the lowest cost. Of equal ones: the one with the fewest recent picks, then by name.

    `hits` says how many leading prompt tokens each worker has cached. `held_tokens` says how many tokens the worker
    gets to hold, if they are not `num_tokens`, and `token_cost` what one of them costs that the worker has not cached.
    A worker of the role `avoided` is picked only if no other worker can be. `lora` is the digest of the adapter that
    the sequence runs with.
    """
    slow, held = slow_speed(workers), held_tokens or num_tokens
    best, reserve = None, False
    for reserve in (False, True):
        among = [view for view in workers if (view.role is avoided) is reserve]
        if best := _cheapest(among, num_tokens, held, hits, slow, token_cost, lora):
            break
    return PlacementDecision(num_tokens, hits, workers, best, held, token_cost, lora, None if reserve else avoided)


def _cheapest(
    workers: Sequence[WorkerView],
    num_tokens: int,
    held: int,
    hits: Mapping[Incarnation, HitCounts],
    slow: float,
    token_cost: float,
    lora: str,
) -> WorkerView | None:
    best: WorkerView | None = None
    lowest = inf
    for view in workers:
        if not view.available or num_tokens >= view.prompt_limit:
            continue
        if view.load_cost > lowest:
            continue  # this load alone is more than the total cost of the best worker so far
        total = sum(_costs(view, held, hits.get(view.incarnation, NO_HITS), slow, token_cost, lora))
        if total < lowest or (total == lowest and best is not None and _order(view) < _order(best)):
            best, lowest = view, total
    return best


def _order(view: WorkerView) -> tuple[int, str]:
    return view.recent_picks, view.worker_id


def room_left(view: WorkerView) -> int:
    """How many more sequences the worker should be given now.

    A sequence that finds no room stays in the shared queue, where it keeps its rank and can still go to any worker.
    """
    if not view.available:
        return 0
    num_rows = view.max_batch_sequences - view.num_running - view.num_coming
    most_coming = max(2, view.max_batch_sequences // 4)  # so that the worker's next step never starts short
    num_sequences = min(num_rows, most_coming - view.num_coming)
    if view.num_running + view.num_coming == 0:
        return max(1, num_sequences)  # all blocks of an idle worker can be evicted
    if view.num_free_blocks + view.num_cached_blocks <= FREE_SHARE * view.num_blocks:
        return 0
    return max(0, num_sequences)


def room_for_prompts(views: Sequence[WorkerView]) -> int:
    """How many more sequences the workers together should be given now."""
    return sum(room_left(view) for view in _for_prompts(views))


def places_to_keep(views: Sequence[WorkerView]) -> int:
    """How many of the workers' last places may be kept for tenants that had less than their share."""
    return int(KEPT_SHARE * sum(view.max_batch_sequences for view in _for_prompts(views)))


def _for_prompts(views: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """The workers that get prompts. Those for outputs get them where no other is available."""
    available = [view for view in views if view.available]
    return [view for view in available if view.role is not WorkerRole.DECODE] or available


def _misfit(view: WorkerView, num_tokens: int) -> str:
    """Why the worker can never run a prompt of so many tokens. Empty if it can."""
    if num_tokens < view.prompt_limit:
        return ""
    if num_tokens >= view.context_tokens:
        return f"{num_tokens} tokens leave no room in its context of {view.context_tokens}"
    return f"{num_tokens} tokens do not fit its {view.num_blocks} blocks of {view.block_size}"


def slow_speed(workers: Sequence[WorkerView]) -> float:
    """Workers with a lower speed of prefill than this count as slow. Smaller differences are noise."""
    return max([view.prefill_tokens_per_s for view in workers if view.available], default=0.0) / SLOW_RATIO


def slowness(view: WorkerView, slow: float) -> float:
    """How many times longer the worker takes than the fastest one: 1 unless it is slower than `slow`."""
    return slow * SLOW_RATIO / view.prefill_tokens_per_s if 0.0 < view.prefill_tokens_per_s < slow else 1.0


def _costs(
    view: WorkerView, num_tokens: int, hits: HitCounts, slow: float, token_cost: float, lora: str
) -> tuple[float, float, float]:
    """The costs of prefill, load and pressure. A worker slower than `slow` pays the first two in proportion."""
    on_device, in_host, in_files = hits
    prefill = token_cost * (num_tokens - on_device - HOST_CREDIT * in_host - FILE_CREDIT * in_files)
    if prefill < 1.0:
        prefill = 1.0  # one token is always computed
    if lora and lora not in view.adapters:
        prefill += ADAPTER_TOKENS
    load = view.load_cost
    if 0.0 < view.prefill_tokens_per_s < slow:
        factor = slowness(view, slow)
        prefill, load = prefill * factor, load * factor
    num_needed = (num_tokens - on_device) // view.block_size + 1  # the last one is for the output
    if view.max_sequence_blocks:
        num_needed = min(num_needed, view.max_sequence_blocks)
    if num_needed <= view.num_free_blocks:
        return prefill, load, 0.0
    return prefill, load, _pressure(view, num_needed, on_device // view.block_size)


def _pressure(view: WorkerView, num_needed: int, num_hit: int) -> float:
    """The cost of the blocks that are missing. The prompt's own blocks, `num_hit`, cannot be evicted to make room."""
    evictable = max(0, view.num_cached_blocks - num_hit)
    missing = num_needed - view.num_free_blocks
    evicted = min(missing, evictable)
    return view.block_size * (EVICTED_SHARE * evicted + PREEMPTION_FACTOR * (missing - evicted))


def _candidate(decision: PlacementDecision, view: WorkerView, slow: float) -> PlacementCandidate:
    hits = decision.hits.get(view.incarnation, NO_HITS)
    costs = _costs(view, decision.held_tokens, hits, slow, decision.token_cost, decision.lora)
    reason = _misfit(view, decision.num_tokens) if view.available else view.reason_unavailable or "unavailable"
    if not reason and view.role is decision.avoided:
        reason = f"is for {'outputs' if view.role is WorkerRole.DECODE else 'prompts'}, and there is another worker"
    in_host = hits.host + hits.files
    return PlacementCandidate(view, not reason, reason, hits.device, in_host, *costs, total_cost=sum(costs))


class PrefixHint(NamedTuple):
    """A worker that has more of a prompt than the one that is to run it."""

    owner: Incarnation
    num_tokens: int  # leading tokens of prompt and output on its device


def find_prefix_owner(
    chosen: WorkerView, num_tokens: int, hits: Mapping[Incarnation, HitCounts], workers: Iterable[WorkerView]
) -> PrefixHint | None:
    """The worker of the same class with the most of these tokens on its device; of equal ones the least busy.

    They are a prompt, and of a sequence that has lost its owner the output, too, which a standby may have. The worker
    may drain: its blocks are the ones that will be gone.

    None if the chosen worker lacks fewer than MIN_BLOCKS of these blocks, on its device and in its host pool together.
    Whether a copy is faster than computing is for the chosen worker to say, which has measured both.
    """
    size = chosen.block_size
    usable = (num_tokens - 1) // size * size  # the last token is computed in any case

    def offered(view: WorkerView) -> int:
        return min(hits.get(view.incarnation, NO_HITS).device, usable)

    there = [view for view in workers if view.available or view.draining]
    others = [v for v in there if v.incarnation != chosen.incarnation and v.numerics == chosen.numerics]
    best = min(others, key=lambda view: (-offered(view), view.load_cost, view.worker_id), default=None)
    here = hits.get(chosen.incarnation, NO_HITS)
    if best is None or offered(best) - here.device - here.host < MIN_BLOCKS * size:
        return None
    return PrefixHint(best.incarnation, offered(best))
