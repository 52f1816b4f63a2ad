"""A small model of workers on a virtual clock, in which rebalancing can be watched for an hour in seconds.

All branches of a worker advance at one speed: a step takes longer the more branches run and the more tokens they hold.
A worker therefore needs one counter of steps, and a heap of the sequences by the step at which they end. A sequence has
one branch. Reports are as old as they are in a real fleet, expectations are as wrong (what is left of `max_tokens`),
and a migration takes the time that its tokens take on the link, while its sequence goes on at the source.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from worker_views import idle_view

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.kv_index import HitCounts
from router.fleet.worker_view import SequenceView, WorkerSnapshot, WorkerView
from router.placing.placement import NO_HITS, choose_worker, room_left
from router.placing.rebalancing import RETURN_S, PastMigration, ProposedMigration, load_of

TICK_S = 0.1
REPORT_S = 0.5
WINDOW_S = 10.0
PLAN_S = 1.0
BLOCK_SIZE = 16
PREFILL_TOKENS_PER_S = 8000.0
COPIED_TOKENS_PER_S = 20_000.0
PREFIX_TOKENS = 1536  # of a popular group
CACHED_PREFIXES = 10  # that a worker's cache keeps
MIGRATION_S = 0.05  # what a migration takes beside the copies
Planner = Callable[[list[WorkerSnapshot], list[PastMigration], float], list[ProposedMigration]]


@dataclass
class ModelSequence:
    seq_id: SequenceId
    num_prompt: int  # beside the prefix
    num_prefix: int  # tokens of the group's prefix
    num_output: int  # tokens that it really generates
    max_tokens: int
    group: int  # sequences of one group begin with the same prefix
    began_at: float = 0.0  # the worker's counter of steps when it came, less the steps that it has had
    moved_at: float = -math.inf


@dataclass
class ModelWorker:
    incarnation: Incarnation
    num_blocks: int
    max_batch: int
    steps: float = 0.0
    held: float = 0.0  # tokens that its sequences hold, beside the prefixes
    read: float = 0.0  # tokens that a step reads: each sequence reads its prefix, too
    prefill_left: float = 0.0
    running: dict[SequenceId, ModelSequence] = field(default_factory=dict)
    ends: list[tuple[float, SequenceId]] = field(default_factory=list)
    waiting: deque[ModelSequence] = field(default_factory=deque)
    prefixes: dict[int, int] = field(default_factory=dict)  # cached: group and tokens, the one last used at the end
    num_dispatched: int = 0
    dispatched_tokens: int = 0
    recent_picks: int = 0
    report: WorkerView | None = None

    @property
    def step_s(self) -> float:
        return 0.012 + 0.0002 * len(self.running) + 1.5e-7 * self.read

    def num_tokens(self, sequence: ModelSequence) -> int:
        return sequence.num_prefix + sequence.num_prompt + int(self.steps - sequence.began_at)

    @property
    def used_blocks(self) -> int:
        return math.ceil(self.held / BLOCK_SIZE) + len(self.running)

    @property
    def cached_blocks(self) -> int:
        return sum(self.prefixes.values()) // BLOCK_SIZE

    def touch_prefix(self, sequence: ModelSequence) -> None:
        if sequence.num_prefix:
            self.prefixes.pop(sequence.group, None)
            self.prefixes[sequence.group] = sequence.num_prefix
            while len(self.prefixes) > CACHED_PREFIXES:
                del self.prefixes[next(iter(self.prefixes))]

    def view(self) -> WorkerView:
        return idle_view(
            self.incarnation,
            queued_tokens=int(self.prefill_left),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            dispatched_tokens=self.dispatched_tokens,
            num_dispatched=self.num_dispatched,
            num_free_blocks=max(0, self.num_blocks - self.used_blocks - self.cached_blocks),
            num_cached_blocks=self.cached_blocks,
            num_blocks=self.num_blocks,
            max_batch_sequences=self.max_batch,
            context_tokens=16384,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            recent_picks=self.recent_picks,
        )

    def snapshot(self) -> WorkerSnapshot:
        sequences = [self._sequence_view(sequence) for sequence in self.running.values()]
        return WorkerSnapshot(view=self.view(), model="m", layout="l", sequences=sequences)

    def _sequence_view(self, sequence: ModelSequence) -> SequenceView:
        num_tokens = self.num_tokens(sequence)
        num_blocks = num_tokens // BLOCK_SIZE + 1
        return SequenceView(
            seq_id=sequence.seq_id,
            num_tokens=num_tokens,
            expected_tokens=sequence.num_prefix + sequence.num_prompt + sequence.max_tokens - num_tokens,
            num_blocks=num_blocks,
            num_own_blocks=num_blocks - sequence.num_prefix // BLOCK_SIZE,
            last_moved_at=sequence.moved_at,
        )

    def begin(self, sequence: ModelSequence, num_done: float = 0.0) -> None:
        """Runs a sequence that has had so many steps elsewhere."""
        sequence.began_at = self.steps - num_done
        self.running[sequence.seq_id] = sequence
        self.held += sequence.num_prompt + num_done
        self.read += sequence.num_prefix + sequence.num_prompt + num_done
        self.touch_prefix(sequence)
        heapq.heappush(self.ends, (sequence.began_at + sequence.num_output, sequence.seq_id))

    def end(self, sequence: ModelSequence) -> float:
        """The sequence leaves. Returns how many steps it has had."""
        del self.running[sequence.seq_id]
        num_done = self.steps - sequence.began_at
        self.held -= sequence.num_prompt + num_done
        self.read -= sequence.num_prefix + sequence.num_prompt + num_done
        return num_done

    def advance(self) -> None:
        time_left = TICK_S
        if self.prefill_left:  # half of each step's time, so that others go on
            computed = min(self.prefill_left, PREFILL_TOKENS_PER_S * TICK_S / 2)
            self.prefill_left -= computed
            time_left -= computed / PREFILL_TOKENS_PER_S
        if self.running:
            num_steps = time_left / self.step_s
            self.steps += num_steps
            self.held += num_steps * len(self.running)
            self.read += num_steps * len(self.running)
        while self.ends and self.ends[0][0] <= self.steps:
            end, seq_id = heapq.heappop(self.ends)
            sequence = self.running.get(seq_id)
            if sequence is not None and sequence.began_at + sequence.num_output == end:
                self.end(sequence)
        while self.waiting and len(self.running) < self.max_batch:
            if self.used_blocks + self.waiting[0].num_prompt // BLOCK_SIZE + 2 > self.num_blocks and self.running:
                break
            self.begin(self.waiting.popleft())


@dataclass
class FleetFigures:
    """What was seen in a run. A load is the mean over a window of ten seconds, beside the mean of all workers then."""

    ratios: list[float] = field(default_factory=list)  # of each window: the highest load of a worker ÷ the mean
    slowest_steps_ms: list[float] = field(default_factory=list)  # of each window: mean step time of the slowest worker
    began: list[tuple[float, ProposedMigration]] = field(default_factory=list)
    num_accepted: int = 0

    def percentile(self, values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class FleetModel:
    """Workers, one queue before them, one router that places, and one planner of migrations or none."""

    def __init__(self, num_workers: int, planner: Planner | None, seed: int, rate: float, num_groups: int = 40) -> None:
        names = [Incarnation(f"w{number:02}") for number in range(num_workers)]
        self.workers = [ModelWorker(name, num_blocks=6000, max_batch=64) for name in names]
        self.figures = FleetFigures()
        self.past: list[PastMigration] = []
        self._arriving: list[tuple[float, ModelSequence, ProposedMigration]] = []
        self._planner = planner
        self._rng = random.Random(seed)
        self._rate = rate
        self._num_groups = num_groups
        self._queue: deque[ModelSequence] = deque()
        self._next_arrival = 0.0
        self.now = 0.0

    def run(self, seconds: float, warm_up_s: float = 120.0) -> FleetFigures:
        """Figures are taken after the warm-up. The clock goes on from the last run."""
        sums = [[0.0, 0.0] for _ in self.workers]
        num_ticks = round(seconds / TICK_S)
        for tick in range(1, num_ticks + 1):
            self.now += TICK_S
            self._arrive()
            for worker, total in zip(self.workers, sums, strict=True):
                worker.advance()
                total[0] += load_of(worker.view())
                total[1] += worker.step_s
            self._finish_migrations()
            if tick % round(REPORT_S / TICK_S) == 0:
                self._report()
            self._dispatch()
            if self._planner and tick % round(PLAN_S / TICK_S) == 0:
                self._plan(self._planner)
            if tick % round(WINDOW_S / TICK_S) == 0:
                if tick * TICK_S > warm_up_s:
                    self._note_window(sums)
                sums = [[0.0, 0.0] for _ in self.workers]
        return self.figures

    def _note_window(self, sums: list[list[float]]) -> None:
        loads = [load for load, _ in sums]
        self.figures.ratios.append(max(loads) / (sum(loads) / len(loads)))
        self.figures.slowest_steps_ms.append(max(steps for _, steps in sums) / (WINDOW_S / TICK_S) * 1000)

    def _arrive(self) -> None:
        """Arrivals swing by 30 % within ten minutes. Few outputs are very long; few prefixes are very popular."""
        rng = self._rng
        while self._next_arrival <= self.now:
            rate = self._rate * (1 + 0.3 * math.sin(self.now / 600 * 2 * math.pi))
            self._next_arrival += rng.expovariate(rate)
            max_tokens = rng.choice((512, 2048, 8192))
            output = min(max_tokens, max(1, int(rng.lognormvariate(6.5, 1.2))))
            prompt = min(4000, 32 + int(rng.lognormvariate(5.0, 1.0)))
            group = min(self._num_groups - 1, int(rng.paretovariate(0.9)) - 1)
            prefix = PREFIX_TOKENS if group < self._num_groups // 2 else 0
            seq_id = SequenceId(f"s{self.figures.num_accepted:06}")
            self._queue.append(ModelSequence(seq_id, prompt, prefix, output, max_tokens, group))
            self.figures.num_accepted += 1

    def _report(self) -> None:
        for worker in self.workers:
            worker.num_dispatched = worker.dispatched_tokens = 0
            worker.recent_picks //= 2
            worker.report = worker.view()

    def _seen(self, worker: ModelWorker) -> WorkerView:
        """The last report, and what was dispatched since."""
        since = {name: getattr(worker, name) for name in ("num_dispatched", "dispatched_tokens", "recent_picks")}
        return replace(worker.report or worker.view(), **since)

    def _dispatch(self) -> None:
        while self._queue:
            views = [self._seen(worker) for worker in self.workers]
            views = [view for view in views if room_left(view)]
            if not views:
                return
            sequence = self._queue.popleft()
            by_id = {worker.incarnation: worker for worker in self.workers}
            num_tokens, hits = sequence.num_prefix + sequence.num_prompt, self._hits_of(sequence)
            chosen = choose_worker(num_tokens, hits, views).worker
            if chosen is None:
                return
            worker = by_id[chosen.incarnation]
            to_compute = num_tokens - hits.get(chosen.incarnation, NO_HITS).device
            worker.prefill_left += to_compute
            worker.touch_prefix(sequence)
            worker.num_dispatched += 1
            worker.dispatched_tokens += to_compute
            worker.recent_picks += 1
            worker.waiting.append(sequence)

    def _hits_of(self, sequence: ModelSequence) -> dict[Incarnation, HitCounts]:
        group = sequence.group
        return {w.incarnation: HitCounts(w.prefixes[group]) for w in self.workers if group in w.prefixes}

    def _plan(self, planner: Planner) -> None:
        self.past = [migration for migration in self.past if migration.under_way or self.now - migration.at < RETURN_S]
        by_id = {worker.incarnation: worker for worker in self.workers}
        for proposed in planner([worker.snapshot() for worker in self.workers], self.past, self.now):
            source = by_id[proposed.source]
            sequence = source.running[proposed.seq_id]
            self.past.append(PastMigration(proposed.seq_id, proposed.source, proposed.target, self.now, under_way=True))
            self.figures.began.append((self.now, proposed))
            takes_s = MIGRATION_S + source.num_tokens(sequence) / COPIED_TOKENS_PER_S
            self._arriving.append((self.now + takes_s, sequence, proposed))

    def _finish_migrations(self) -> None:
        by_id = {worker.incarnation: worker for worker in self.workers}
        for entry in [entry for entry in self._arriving if entry[0] <= self.now]:
            self._arriving.remove(entry)
            _, sequence, proposed = entry
            source, target = by_id[proposed.source], by_id[proposed.target]
            for number, migration in enumerate(self.past):
                if migration.under_way and migration.seq_id == proposed.seq_id:
                    self.past[number] = replace(migration, under_way=False)
            if source.running.get(sequence.seq_id) is sequence:
                target.begin(sequence, source.end(sequence))
                sequence.moved_at = self.now
