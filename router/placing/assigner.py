"""Gives sequences to workers: new ones from the queue, and those whose owner was lost. The store decides who owns.

The same few steps either way: read the record, choose a worker, take in its name, schedule there. Whatever goes wrong
between take and schedule only costs another epoch.
"""

import asyncio
import logging
import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from octavo import hashing, limits, wire
from octavo.errors import Failure, TooLarge
from octavo.ids import Incarnation, SequenceId, new_operation_id
from octavo.record import Record, Snapshot
from octavo.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import Finish, TakeReason, TakeReply, TakeRequest, TakeStatus
from router.background_tasks import BackgroundTasks, patiently
from router.fleet.admission import Admission, Outcome
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.fleet.worker_link import LinkBroken, WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import WorkerView
from router.placing.placement import PlacementDecision, place
from router.session_registry import Assignment, SessionRegistry

log = logging.getLogger(__name__)

DECISIONS_REMEMBERED = 1024
ALONE_AFTER_CRASHES = 2
UNSERVED_S = 0.5  # after which a request that no worker can take now goes back into the queue
ALL_JOURNALS = [0] * limits.MAX_N  # a record has at most that many branches


@dataclass(slots=True)
class AssignmentAttempt:
    """One sequence on its way to a worker."""

    snapshot: Snapshot
    epoch: int
    why: TakeReason
    excluded: set[Incarnation]
    num_to_compute: int = 0  # tokens that the chosen worker has not cached
    never: Failure | None = None  # a worker said that it can never hold this
    later: bool = False  # another said that it cannot now

    @property
    def record(self) -> Record:
        return self.snapshot.record

    @property
    def crashes(self) -> int:
        """As the store will count them when it is taken."""
        return self.record.crashes + (self.why in (TakeReason.LEASE, TakeReason.CONNECTION))

    @property
    def tokens(self) -> list[int]:
        """What a worker needs in its cache before it can go on."""
        return [*self.snapshot.prompt, *(self.snapshot.outputs[0] if self.snapshot.outputs else ())]


@dataclass
class Assigner:
    """Starts sequences on workers. One attempt per sequence at a time on this router; others may try too."""

    store: Store
    pool: WorkerPool
    sessions: SessionRegistry
    models: ModelRegistry
    background: BackgroundTasks
    decisions: OrderedDict[SequenceId, PlacementDecision] = field(default_factory=OrderedDict)
    _busy: set[SequenceId] = field(default_factory=set)

    def busy(self, seq_id: SequenceId) -> bool:
        """Whether an attempt is under way here; sessions are told how it ends."""
        return seq_id in self._busy

    async def start(self, seq_id: SequenceId, expected_epoch: int, why: TakeReason) -> None:
        """Puts a sequence on a worker, if it still is at that epoch and somebody has room."""
        if seq_id in self._busy:
            return
        self._busy.add(seq_id)
        try:
            snapshot = await self._read(seq_id, prompt=True)
            if snapshot is None or snapshot.record.state.ended or snapshot.record.epoch != expected_epoch:
                self.sessions.check([seq_id])
                return
            owner = snapshot.record.owner
            await self._start(AssignmentAttempt(snapshot, expected_epoch, why, {owner} if owner else set()))
        finally:
            self._busy.discard(seq_id)

    def explain(
        self, model: ServedModel, tokens: list[int], salt: str, excluded: set[Incarnation]
    ) -> PlacementDecision:
        """What placement would decide now."""
        root = hashing.root_key(model.fingerprint, model.layout, salt=salt)
        hits = self.pool.index.hits(hashing.block_hashes(root, tokens, model.block_size))
        in_tokens = {id: (device * model.block_size, host * model.block_size) for id, (device, host) in hits.items()}
        views = [view for view in self.pool.views(model) if view.incarnation not in excluded]
        return place(len(tokens), in_tokens, views)

    async def _start(self, attempt: AssignmentAttempt) -> None:
        while (link := self._choose(attempt)) is not None:
            seq_id, admitted = attempt.record.seq_id, False
            try:
                outcome, failure = await self._try(attempt, link)
                admitted = outcome is Outcome.ADMITTED
            finally:
                if not admitted:
                    link.pending_dispatches.refused(seq_id)
            if admitted:
                self.sessions.placed(seq_id, Assignment(attempt.epoch, link.incarnation))
                return
            if outcome is None:  # it is somebody else's now, or it has ended
                self.sessions.check([seq_id])
                return
            if outcome is Outcome.REJECTED:
                await self._fail(seq_id, failure)
                return
            if outcome is Outcome.NEVER:
                attempt.never = failure
            elif outcome is Outcome.LATER:
                attempt.later = True
        await self._give_up(attempt)

    async def _try(self, attempt: AssignmentAttempt, link: WorkerLink) -> tuple[Outcome | None, Failure | None]:
        """One worker's answer; None if the sequence is not there to be placed any more."""
        if attempt.why in (TakeReason.LEASE, TakeReason.CONNECTION):
            await link.pace(attempt.num_to_compute)
        taken = await self._take(attempt, link)
        if taken.status is TakeStatus.FROZEN:  # the worker died while this waited for it
            attempt.excluded.add(link.incarnation)
            return Outcome.LATER, None
        if taken.status not in (TakeStatus.OK, TakeStatus.SAME):
            return None, None
        fresh, attempt.epoch = attempt.why is TakeReason.QUEUED, taken.epoch
        attempt.why = TakeReason.REFUSED  # should this worker not take it
        attempt.excluded.add(link.incarnation)
        if not fresh and not await self._read_again(attempt):
            return None, None
        admission, follow = admission_of(attempt.snapshot, taken), attempt.record.seq_id in self.sessions
        was_alive = link.steps.connected
        try:
            outcome, failure = await link.schedule(admission, follow)
        except LinkBroken as error:
            log.warning("%s", error)
            if was_alive and await link.probe() is False:
                attempt.why = TakeReason.CONNECTION  # it may have begun, and died of it
            return Outcome.LATER, None
        return (None if outcome is Outcome.STALE_EPOCH else outcome), failure

    async def _take(self, attempt: AssignmentAttempt, link: WorkerLink) -> TakeReply:
        seq_id, take_id = attempt.record.seq_id, new_operation_id()
        while True:
            taken = await patiently(
                lambda: self.store.take_ownership(
                    TakeRequest(seq_id, attempt.epoch, link.incarnation, take_id, attempt.why)
                )
            )
            if taken.status is not TakeStatus.FROZEN or link.lost:
                return taken
            await asyncio.sleep(taken.retry_ms / 1000)

    async def _read(self, seq_id: SequenceId, prompt: bool) -> Snapshot | None:
        snapshot = await patiently(lambda: self.store.read(seq_id, prompt=prompt, from_indexes=ALL_JOURNALS))
        if snapshot is None:
            return None
        return replace(snapshot, outputs=snapshot.outputs[: snapshot.record.num_branches])

    async def _read_again(self, attempt: AssignmentAttempt) -> bool:
        """Until the take, the old owner may have gone on: only now is the journal at its end for sure."""
        snapshot = await self._read(attempt.record.seq_id, prompt=False)
        if snapshot is None or snapshot.record.state.ended or snapshot.record.epoch != attempt.epoch:
            return False
        attempt.snapshot = replace(snapshot, prompt=attempt.snapshot.prompt)
        return True

    def _choose(self, attempt: AssignmentAttempt) -> WorkerLink | None:
        record, tokens = attempt.record, attempt.tokens
        model = self.models.of(record)
        if model is None:
            return None
        decision = self.explain(model, tokens, record.salt, attempt.excluded)
        if attempt.crashes >= ALONE_AFTER_CRASHES:
            decision = replace(decision, worker=quietest(decision))
        self._remember(record.seq_id, decision)
        link = self.pool.find(decision.worker.incarnation) if decision.worker else None
        if link is not None:
            on_device, _ = decision.hits.get(link.incarnation, (0, 0))
            attempt.num_to_compute = len(tokens) - on_device
            link.pending_dispatches.sent(
                record.seq_id, attempt.num_to_compute
            )  # before any report has it: a burst spreads
        return link

    def _remember(self, seq_id: SequenceId, decision: PlacementDecision) -> None:
        self.decisions[seq_id] = decision
        self.decisions.move_to_end(seq_id)
        if len(self.decisions) > DECISIONS_REMEMBERED:
            self.decisions.popitem(last=False)

    async def _give_up(self, attempt: AssignmentAttempt) -> None:
        """Nobody took it: it ends if nobody ever can, and waits if somebody may."""
        record, epoch = attempt.record, attempt.epoch
        if not attempt.later and (failure := attempt.never or self._too_large(attempt)):
            await self._fail(record.seq_id, failure)
        elif attempt.why is TakeReason.REFUSED:
            await patiently(lambda: self.store.requeue(record.seq_id, epoch))
            self.sessions.check([record.seq_id])
        elif attempt.why is TakeReason.QUEUED:
            self.background.spawn(self._requeue_later(record.seq_id, epoch))
        # an orphan stays one: the next sweep tries again

    async def _requeue_later(self, seq_id: SequenceId, epoch: int) -> None:
        """Not at once: it would be popped at once."""
        await asyncio.sleep(UNSERVED_S * random.uniform(0.5, 1.5))
        await patiently(lambda: self.store.requeue(seq_id, epoch))

    def _too_large(self, attempt: AssignmentAttempt) -> Failure | None:
        model, num_tokens = self.models.of(attempt.record), len(attempt.tokens)
        views = self.pool.views(model) if model else []
        if not views or any(num_tokens < view.prompt_limit for view in views):
            return None
        limit = max(view.prompt_limit for view in views)
        return TooLarge(f"prompt of {num_tokens} tokens: the largest worker holds fewer than {limit}").failure()

    async def _fail(self, seq_id: SequenceId, failure: Failure | None) -> None:
        failure = failure or TooLarge("no worker can hold this request").failure()
        await patiently(lambda: self.store.finish(Finish(seq_id, FinishReason.ERROR, failure=failure.to_json())))
        self.sessions.check([seq_id])


def quietest(decision: PlacementDecision) -> WorkerView | None:
    """Where a suspect disturbs the fewest others."""
    eligible = [candidate for candidate in decision.candidates if candidate.eligible]
    best = min(eligible, key=lambda c: (c.worker.num_running + c.worker.num_coming, c.total_cost), default=None)
    return best.worker if best else None


def admission_of(snapshot: Snapshot, taken: TakeReply) -> Admission:
    record = snapshot.record
    return Admission(
        seq_id=record.seq_id,
        epoch=taken.epoch,
        prompt=snapshot.prompt,
        outputs=snapshot.outputs,
        finished_branches=[branch for branch, finish in enumerate(record.finishes) if finish],
        sampling=wire.sampling_from_bytes(record.sampling),
        salt=record.salt,
        priority=record.priority,
        deadline_in_ms=max(1, record.deadline_ms - snapshot.now_ms) if record.deadline_ms else 0,
        alone=taken.crashes >= ALONE_AFTER_CRASHES,
    )
