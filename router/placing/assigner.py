"""Assigns sequences to workers: new ones from the queue, and those whose owner was lost. The store decides who owns.

Every assignment takes the same steps: read the record, choose a worker, take ownership in that worker's name, ask that
worker to schedule the sequence. Whatever goes wrong after the ownership was taken only costs another epoch.
"""

import asyncio
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.process.retry import until_answered
from octavo.request import limits
from octavo.request.errors import Failure, StaleEpoch, TooLarge, Unreachable
from octavo.request.ids import Incarnation, SequenceId, new_operation_id
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, Record, Snapshot
from octavo.request.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import Finish, TakeReason, TakeReply, TakeRequest, TakeStatus
from octavo.wire.internal import admission_to_wire
from router.background_tasks import BackgroundTasks
from router.fleet.limits_registry import LimitsRegistry
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.fleet.worker_link import LinkError, ProbeResult, WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import WorkerView
from router.placing.assignment_attempt import AssignmentAttempt
from router.placing.placement import NO_HITS, PlacementDecision, choose_worker, find_prefix_owner
from router.placing.worker_refusals import WorkerRefusals, remember
from router.session_registry import Assignment, SessionRegistry

log = logging.getLogger(__name__)

REQUEUE_DELAY_S = 0.5  # after which a sequence that no worker can take now goes back into the queue
STORE_PATIENCE_S = 20.0
SOON_MS = 25  # after which the store has seen a connection break that a router has seen break
CLOCK_GRAIN_MS = 5  # how much later than the store says a take is repeated: the clocks of two processes tick apart
ALL_JOURNALS = [0] * limits.MAX_N  # from index 0 on; no record has more branches

# The answer where the store did not give the sequence: its owner lives, another router was faster, or the sequence has
# ended or is gone.
NOT_ASSIGNABLE = AdmissionAnswer(
    AdmissionOutcome.STALE_EPOCH, StaleEpoch("the sequence has ended, or has a newer owner").failure()
)


@dataclass
class Assigner:
    """Makes one attempt per sequence and epoch at a time. Other routers may make the same one; the store decides."""

    store: Store
    pool: WorkerPool
    sessions: SessionRegistry
    models: ModelRegistry
    limits: LimitsRegistry
    background: BackgroundTasks
    decisions: OrderedDict[SequenceId, PlacementDecision] = field(default_factory=OrderedDict)  # the oldest first
    on_admitted: Callable[[SequenceId, WorkerLink], None] = lambda seq_id, link: None
    takes: Counter[TakeReason] = field(default_factory=Counter)  # that gave a sequence an owner, so far
    answers: Counter[AdmissionOutcome] = field(default_factory=Counter)  # of workers that were asked, so far
    num_unanswered: int = 0  # requests to run a sequence, so far
    numerics_changes: Counter[str] = field(default_factory=Counter)  # by model: sequences that went on in another class
    _in_progress: dict[SequenceId, set[int]] = field(default_factory=dict)  # the epochs that attempts began with

    def __post_init__(self) -> None:
        self._refusals = WorkerRefusals(self.pool, self.models, self.limits)

    def is_assigning(self, seq_id: SequenceId) -> bool:
        """Whether an attempt is in progress here.

        The attempt tells the sessions of the sequence if it has assigned or ended the sequence, if it has put the
        sequence back into the queue after a worker did not admit it, and if the store did not give the sequence.
        Otherwise the sessions find out by reading the record.
        """
        return seq_id in self._in_progress

    async def assign_sequence(
        self, seq_id: SequenceId, expected_epoch: int, reason: TakeReason, seen: str = ""
    ) -> None:
        """Assigns a sequence to a worker, if the sequence still has that epoch and a worker has room.

        `seen` is what speaks against its owner, for the timeline.
        """
        await self._assign_once(seq_id, expected_epoch, reason, None, seen)

    async def assign_popped(self, popped: Snapshot) -> None:
        """Assigns a sequence that this router has just popped, if a worker has room."""
        record = popped.record
        await self._assign_once(record.seq_id, record.epoch, TakeReason.QUEUED, popped)

    async def _assign_once(
        self, seq_id: SequenceId, expected_epoch: int, reason: TakeReason, snapshot: Snapshot | None, seen: str = ""
    ) -> None:
        # An attempt at an older epoch may still wait until the store allows its take. It must not keep this one back: a
        # sequence that was popped and is then forgotten waits until its claim has ended.
        epochs = self._in_progress.setdefault(seq_id, set())
        if expected_epoch in epochs:
            return
        epochs.add(expected_epoch)
        try:
            snapshot = snapshot or await self._read(seq_id, prompt=True)
            read_at = time.monotonic()
            if snapshot is None or snapshot.record.state.ended or snapshot.record.epoch != expected_epoch:
                self.sessions.poll_records([seq_id])
                return
            owner = snapshot.record.owner
            attempt = AssignmentAttempt(snapshot, read_at, expected_epoch, reason, {owner} if owner else set())
            attempt.seen = seen
            self._refusals.recall(attempt)
            if attempt.recovers:
                attempt.unfit.add(owner)
            await self._assign(attempt)
        finally:
            epochs.discard(expected_epoch)
            if not epochs:
                self._in_progress.pop(seq_id, None)

    def decide_placement(
        self,
        model: ServedModel,
        tokens: list[int],
        salt: str,
        excluded: set[Incarnation],
        numerics: str = "",
        lora: str = "",
        pictures: str = "",
    ) -> PlacementDecision:
        """Which worker a sequence with these tokens would be assigned to now: one of this class, if one is named.

        `lora` is the digest of its adapter; `pictures` are those that its prompt shows.
        """
        hits = self.pool.find_hits(model, tokens, salt, lora, pictures)
        views = [view for view in self.pool.views(model) if view.incarnation not in excluded]
        views = [view for view in views if not numerics or view.numerics == numerics]
        return choose_worker(len(tokens), hits, views, lora=lora)

    async def _assign(self, attempt: AssignmentAttempt) -> None:
        """Asks one worker after another."""
        seq_id = attempt.record.seq_id
        while True:
            link = self._choose_link(attempt)
            if link is None and attempt.occupied:
                pause_ms = min(attempt.occupied.values())  # until one of those that run other suspects may be free
                await asyncio.sleep(pause_ms / 1000)
                attempt.waited_ms += pause_ms
                attempt.occupied.clear()
                continue
            if link is None:
                break
            answer = await self._ask(attempt, link)
            if answer.failure is not None and attempt.reason is not TakeReason.QUEUED:
                attempt.seen = answer.failure.message
            match answer.outcome:
                case AdmissionOutcome.ADMITTED:
                    assignment = Assignment(attempt.epoch, link.incarnation, attempt.follows)
                    self.sessions.announce_assignment(seq_id, assignment)
                    self.on_admitted(seq_id, link)
                    return
                case AdmissionOutcome.STALE_EPOCH:
                    self.sessions.poll_records([seq_id])
                    return
                case AdmissionOutcome.REJECTED:
                    await self._fail(seq_id, attempt.epoch, answer.failure)
                    return
                case AdmissionOutcome.NEVER:
                    self._refusals.note(attempt, link.incarnation, answer.failure)
                case AdmissionOutcome.LATER:
                    attempt.retry_later = True
                    attempt.awaits_adapter |= answer.awaits_adapter
        await self._give_up(attempt)

    async def _ask(self, attempt: AssignmentAttempt, link: WorkerLink) -> AdmissionAnswer:
        """The worker's answer. The sequence counts as dispatched to it meanwhile, and longer only if it is admitted."""
        dispatches, seq_id = link.pending_dispatches, attempt.record.seq_id
        dispatches.add(seq_id, attempt.num_to_compute)
        try:
            answer = await self._take_and_schedule(attempt, link)
        except BaseException:
            dispatches.remove(seq_id)
            raise
        if not answer.admitted:
            dispatches.remove(seq_id)
        return answer

    async def _take_and_schedule(self, attempt: AssignmentAttempt, link: WorkerLink) -> AdmissionAnswer:
        if attempt.recovers:
            await link.wait_to_replay(attempt.num_to_compute)
        taken = await self._take_ownership(attempt, link)
        if taken.status in (TakeStatus.FROZEN, TakeStatus.ALIVE) and link.lost:
            attempt.excluded.add(link.incarnation)
            return not_now("the worker was lost while the store did not allow a take yet")
        if taken.status is TakeStatus.ALIVE and attempt.taken_here:
            # This router alone has no connection to that owner. What it gave the owner it may give to another one.
            attempt.reason = TakeReason.REFUSED
            taken = await self._take_ownership(attempt, link)
        if taken.status is TakeStatus.OCCUPIED:
            attempt.occupied[link.incarnation] = taken.retry_ms
            return not_now("the worker has the trial of another suspect")
        if taken.status is TakeStatus.POISON:
            await self._log_blame(attempt.record.seq_id)
        if taken.status not in (TakeStatus.OK, TakeStatus.SAME):
            return NOT_ASSIGNABLE
        self.takes[attempt.reason] += 1
        is_new, attempt.epoch, attempt.taken_here = attempt.reason is TakeReason.QUEUED, taken.epoch, True
        before = attempt.record.numerics
        attempt.reason = TakeReason.REFUSED  # holds if this worker does not admit the sequence
        attempt.excluded.add(link.incarnation)
        if not is_new and not await self._reread_journals(attempt):
            return NOT_ASSIGNABLE
        self._note_numerics(attempt.record, before, link)
        age_ms = int(1000 * (time.monotonic() - attempt.read_at))
        admission = admission_to_wire(
            attempt.snapshot, epoch=taken.epoch, suspect=taken.suspect, age_ms=age_ms, hint=attempt.hint
        )
        attempt.follows = attempt.record.seq_id in self.sessions
        was_connected = link.step_stream.connected
        try:
            answer = await link.schedule(admission, attempt.follows)
            self.answers[answer.outcome] += 1
            return answer
        except LinkError as error:
            log.warning("%s", error)
            self.num_unanswered += 1
            found = await link.probe() if was_connected else None
            if found is ProbeResult.GONE or (found is ProbeResult.UNKNOWN and error.lost_connection):
                attempt.reason = TakeReason.CONNECTION  # the worker may have begun the sequence, and died of it
            return not_now(str(error))

    async def _take_ownership(self, attempt: AssignmentAttempt, link: WorkerLink) -> TakeReply:
        """The store's reply. While it is FROZEN (the store has just restarted), the take is repeated; FROZEN is
        returned only if the worker was lost meanwhile.

        After ALIVE, a take because of a lost connection is repeated twice: soon, since the store may have seen its own
        connection break a moment after this router, and when the owner has renewed its lease if it lives.
        """
        seq_id, epoch, take_id = attempt.record.seq_id, attempt.epoch, new_operation_id()
        reason, waited_ms = attempt.reason, attempt.waited_ms
        request = TakeRequest(seq_id, epoch, link.incarnation, take_id, reason, waited_ms, link.numerics, attempt.seen)
        num_alive, unreached = 0, attempt.reason is TakeReason.CONNECTION  # all that speaks against the owner
        while True:
            taken = await until_answered(
                lambda: self.store.take_ownership(request), patience_s=STORE_PATIENCE_S, what="take"
            )
            is_alive = taken.status is TakeStatus.ALIVE
            num_alive += is_alive
            ask_again = taken.status is TakeStatus.FROZEN or (is_alive and unreached and num_alive < 3)
            if not ask_again or link.lost:
                return taken
            retry_ms = min(taken.retry_ms, SOON_MS) if num_alive == 1 else taken.retry_ms
            await asyncio.sleep((retry_ms + CLOCK_GRAIN_MS) / 1000)

    async def _log_blame(self, seq_id: SequenceId) -> None:
        """Says in the log which workers a sequence was blamed for."""
        if (snapshot := await self._read(seq_id, prompt=False)) is None:
            return
        record = snapshot.record
        owners = ", ".join(f"{self.pool.name_of(owner) or 'a worker'} ({owner})" for owner in record.suspects)
        text = "sequence %s (request %s) ends with POISON_SUSPECTED: %d owners died while running it: %s"
        log.error(text, seq_id, record.request_id, record.crashes, owners)

    async def _read(self, seq_id: SequenceId, prompt: bool) -> Snapshot | None:
        snapshot = await until_answered(
            lambda: self.store.read(seq_id, prompt=prompt, from_indexes=ALL_JOURNALS),
            patience_s=STORE_PATIENCE_S,
            what="read",
        )
        if snapshot is None:
            return None
        return replace(snapshot, outputs=snapshot.outputs[: snapshot.record.num_branches])

    async def _reread_journals(self, attempt: AssignmentAttempt) -> bool:
        """Reads what the old owner has added until the take. Returns whether the sequence is still to be assigned."""
        snapshot = await self._read(attempt.record.seq_id, prompt=False)
        if snapshot is None or snapshot.record.state.ended or snapshot.record.epoch != attempt.epoch:
            return False
        attempt.snapshot, attempt.read_at = replace(snapshot, prompt=attempt.snapshot.prompt), time.monotonic()
        return True

    def _choose_link(self, attempt: AssignmentAttempt) -> WorkerLink | None:
        record, tokens = attempt.record, attempt.tokens
        model = self.models.find_for_record(record)
        if model is None:
            return None
        excluded, numerics = attempt.excluded | {*attempt.occupied}, self._refusals.class_to_keep(attempt, model)
        decision = self.decide_placement(
            *(model, tokens, record.salt, excluded, numerics, record.lora, record.pictures)
        )
        if attempt.suspected:
            decision = replace(decision, worker=quietest_worker(decision))
        remember(self.decisions, record.seq_id, decision)
        link = self.pool.find_link(decision.worker.incarnation) if decision.worker else None
        if link is not None:
            attempt.num_to_compute = len(tokens) - decision.hits.get(link.incarnation, NO_HITS).device
        if decision.worker is not None:  # one that has just refused the sequence may have its prefix all the same
            views = self.pool.views(model)
            attempt.hint = find_prefix_owner(decision.worker, attempt.num_shared, decision.hits, views)
        return link

    def _note_numerics(self, record: Record, before: str, link: WorkerLink) -> None:
        """Tells of a sequence that goes on in another class. The store tells it in the record."""
        now, model = link.numerics, self.models.find_for_record(record)
        if model is None or not (before and now and before != now and any(record.num_tokens)):
            return
        self.numerics_changes[model.name] += 1
        log.warning("request %s goes on with other bits: %s, after %s", record.request_id, now, before)

    async def _give_up(self, attempt: AssignmentAttempt) -> None:
        """Ends an attempt in which no worker has admitted the sequence.

        The sequence fails if it is too large, or if workers said NEVER, and if no other worker that is here, or was
        here lately, may hold it. Else it waits, as it does where its model has no worker.
        """
        record, epoch = attempt.record, attempt.epoch
        if not attempt.retry_later and await self._refusals.leave_no_worker(attempt):
            refused = next((each for each in attempt.refusals.values() if each), None)
            failure = refused or self._refusals.too_large(attempt)
            await self._fail(record.seq_id, epoch, failure)
        elif attempt.reason is TakeReason.REFUSED:
            # A worker that lacks an adapter stays available.
            requeue = self._requeue_later if attempt.awaits_adapter else self._requeue
            await requeue(record.seq_id, epoch, attempt.seen)
            self.sessions.poll_records([record.seq_id])
        elif attempt.reason is TakeReason.QUEUED:
            self.background.spawn(self._requeue_later(record.seq_id, epoch))
        # A sequence without a living owner stays as it is: a sweep after the end of the owner's lease finds it again.

    async def _requeue_later(self, seq_id: SequenceId, epoch: int, seen: str = "") -> None:
        """Puts the sequence back into the queue after a pause: without the pause it would be popped again at once."""
        try:
            await asyncio.sleep(REQUEUE_DELAY_S * random.uniform(0.5, 1.5))
        finally:
            await self._requeue(seq_id, epoch, seen)  # also if this router ends meanwhile: others need not wait

    async def _requeue(self, seq_id: SequenceId, epoch: int, seen: str = "") -> None:
        await until_answered(
            lambda: self.store.requeue(seq_id, epoch, seen), patience_s=STORE_PATIENCE_S, what="requeue"
        )

    async def _fail(self, seq_id: SequenceId, epoch: int, failure: Failure | None) -> None:
        failure = failure or TooLarge("no worker can hold this request").failure()
        finish = Finish(seq_id, FinishReason.ERROR, failure=failure.to_json(), epoch=epoch)
        await until_answered(
            lambda: self.store.finish(finish), patience_s=STORE_PATIENCE_S, what="end of a failed sequence"
        )
        self.sessions.poll_records([seq_id])


def not_now(message: str) -> AdmissionAnswer:
    """The answer for a worker that did not give one itself. Another worker may take the sequence."""
    return AdmissionAnswer(AdmissionOutcome.LATER, Unreachable(message).failure())


def quietest_worker(decision: PlacementDecision) -> WorkerView | None:
    """The eligible worker with the fewest sequences, where one that may kill its worker disturbs the fewest others."""
    eligible = [candidate for candidate in decision.candidates if candidate.eligible]
    best = min(eligible, key=lambda c: (c.worker.num_running + c.worker.num_coming, c.total_cost), default=None)
    return best.worker if best else None
