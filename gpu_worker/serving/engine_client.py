"""What RPC handlers and the journal ask of the engine, and what of it comes back to the event loop, in which order.

Lives on the event loop; whatever touches the scheduler is posted to the engine and runs between two steps. What the
engine decided comes back in the order it decided it: a log begins before the first result it is for.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from gpu_worker.engine.engine import Engine, Grant
from gpu_worker.scheduling.load import Load
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.sequence import Sequence
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import Workload
from gpu_worker.serving.cache_watchers import CacheEvent, CacheEventBatch, CacheWatcher, CacheWatchers, join_events
from gpu_worker.serving.step_publisher import StepPublisher
from gpu_worker.serving.step_subscription import MAX_PENDING_MESSAGES, StepSubscription
from octavo import hashing, validation
from octavo.errors import InvalidArgument, ServingError, StaleEpoch
from octavo.ids import SequenceId
from octavo.record import Admission, AdmissionAnswer, AdmissionOutcome

SwapOperation = Literal["out", "in", "drop"]
log = logging.getLogger(__name__)

MAX_GRANT_STEPS = MAX_PENDING_MESSAGES // 2  # finite steps that a Step stream may wait for at once


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the worker was at one moment between two steps, and how fast it has been."""

    load: Load
    num_steps: int
    step_s: float
    prefill_tokens_per_s: float


class EngineClient:
    """Everything the Worker service and the journal ask of the engine."""

    def __init__(self, engine: Engine, workload: Workload, budget: StepBudget, publisher: StepPublisher) -> None:
        """Reads the workload in commands and in `refresh` only: on the engine's thread, between steps."""
        self.engine = engine
        self.info = workload.info
        self.max_batch_sequences = workload.config.max_batch_sequences
        self.publisher = publisher
        self.watchers = CacheWatchers()
        self._workload = workload
        self._cache = workload.tables.cache
        self._budget = budget
        self.report = self._measure_load()
        self._loop = asyncio.get_running_loop()
        self._deciding: dict[tuple[SequenceId, int], asyncio.Task[AdmissionAnswer]] = {}

    # Admission

    async def admit(self, admission: Admission, router_id: str) -> AdmissionAnswer:
        """The worker's answer; a repeated admission gets the answer of the first one, decided or not yet.

        Raises Draining if the engine has ended.
        """
        key = (admission.seq_id, admission.epoch)
        deciding = self._deciding.get(key)
        if deciding is None:
            deciding = asyncio.create_task(self._decide(admission, router_id))
            self._deciding[key] = deciding
            deciding.add_done_callback(lambda _: self._deciding.pop(key))
        answer = await asyncio.shield(deciding)
        entry = self.publisher.logs.get(admission.seq_id)
        if entry is not None and entry.epoch == admission.epoch:
            self.publisher.add_follower(entry, router_id)
        return answer

    async def _decide(self, admission: Admission, router_id: str) -> AdmissionAnswer:
        known_epoch = self.publisher.known_epoch(admission.seq_id)
        if known_epoch == admission.epoch:  # also when it has ended since
            return AdmissionAnswer(AdmissionOutcome.ADMITTED)
        if known_epoch is not None and known_epoch > admission.epoch:
            stale = StaleEpoch(f"sequence {admission.seq_id} was here at epoch {known_epoch}, not {admission.epoch}")
            return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale.failure())
        try:
            sequence = self._sequence(admission)
        except InvalidArgument as error:
            return AdmissionAnswer(AdmissionOutcome.REJECTED, error.failure())
        command = self._admission(sequence, admission, router_id)
        return await asyncio.wrap_future(self.engine.post_command(command))

    def _admission(
        self, sequence: Sequence, admission: Admission, router_id: str
    ) -> Callable[[Scheduler], AdmissionAnswer]:
        """Admits the sequence and opens its log. The log of an older epoch ends with the older sequence."""
        outputs = admission.outputs or [[] for _ in range(sequence.params.num_branches)]
        chain = hashing.prompt_chain(sequence.prompt)
        publisher, soon = self.publisher, self._loop.call_soon_threadsafe

        def command(scheduler: Scheduler) -> AdmissionAnswer:
            answer = scheduler.admit(sequence)
            if answer.admitted:
                soon(publisher.open_log, sequence, chain, outputs, admission.finished_branches, router_id)
            else:
                soon(publisher.forget_before, sequence.seq_id, sequence.epoch)
            return answer

        return command

    def _sequence(self, admission: Admission) -> Sequence:
        """Raises InvalidArgument with the field that is wrong."""
        info = self.info
        validation.validate_admission(
            admission,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_token_ids=info.eos_token_ids,
        )
        root = hashing.root_key(info.fingerprint, info.layout, salt=admission.salt)
        return Sequence.from_admission(admission, root=root, now=time.monotonic())

    # What routers ask of sequences

    def cancel(self, sequences: Seq[tuple[SequenceId, int]]) -> None:
        """Ends each sequence with CANCELLED, unless it is here at a newer epoch than the one given."""

        def command(scheduler: Scheduler) -> None:
            for seq_id, epoch in sequences:
                sequence = self._workload.sequences.get(seq_id)
                if sequence is not None and sequence.epoch <= epoch:
                    scheduler.cancel(sequence)

        self._post(command)

    async def swap(self, seq_id: SequenceId, epoch: int, operation: SwapOperation) -> int:
        """Moves a sequence's blocks between two steps; how many moved. Raises what Scheduler.swap raises."""
        return await asyncio.wrap_future(
            self.engine.post_command(lambda scheduler: scheduler.swap(seq_id, epoch, operation))
        )

    # What routers ask of the loop

    def grant_steps(self, subscription: StepSubscription, steps: int) -> None:
        """Lets the engine run `steps` steps, which this stream is told of; 0 lets it run until `pause`."""
        if not steps <= MAX_GRANT_STEPS - subscription.num_awaited:
            raise InvalidArgument(
                "grant.steps",
                f"{steps} beside the {subscription.num_awaited} still to come are more than {MAX_GRANT_STEPS}; "
                "grant 0 to let the worker run until Pause",
            )
        subscription.num_awaited += steps
        self.engine.grant_steps(steps, subscription.subscription_id)

    def pause(self) -> None:
        """Takes back all grants, and tells streams not to wait for steps that will not come."""

        def revoke(future: "Future[list[Grant]]") -> None:
            for grant in future.result() if not future.exception() else ():
                if grant.subscription_id is not None:
                    self._loop.call_soon_threadsafe(self.publisher.revoke_steps, grant.subscription_id, grant.steps)

        self.engine.pause().add_done_callback(revoke)

    # What the journal tells the engine of one sequence, and not of another admission that has replaced it

    def cancel_one(self, sequence: Sequence) -> None:
        """Ends the sequence with CANCELLED."""
        self._post(lambda scheduler: scheduler.cancel(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forgets the sequence, and nothing more is told of it: it has another owner, or its record has ended."""
        self._post(lambda scheduler: scheduler.drop(sequence))

    def end_branch(self, sequence: Sequence, branch: int) -> None:
        """Runs one branch no further: a router has found its end."""
        self._post(lambda scheduler: scheduler.end_branch(sequence, branch))

    def hold_steps(self, held: bool) -> None:
        """Keeps steps from beginning while the journal is too far behind."""
        self.engine.hold_steps(held)

    def _post(self, command: Callable[[Scheduler], object]) -> None:
        self.engine.post_command(command).add_done_callback(log_failure)

    # Cache events and load

    @property
    def max_batch_tokens(self) -> int:
        """How many tokens a step may run now."""
        return self._budget.tokens

    def refresh(self) -> None:
        """Tells watchers what the last steps changed. To be called on the engine's thread, between steps."""
        events = join_events(self._cache.take_events())
        self._loop.call_soon_threadsafe(self._publish, self._measure_load(), events, self._cache.digest)

    def _measure_load(self) -> LoadReport:
        times = self.engine.times
        return LoadReport(Load.of(self._workload), times.num_steps, times.step_s, times.prefill_tokens_per_s)

    def _publish(self, report: LoadReport, events: Seq[CacheEvent], digest: int) -> None:
        self.report = report
        if events:
            self.watchers.publish_events(events, digest)

    async def begin_watch(self, watcher: CacheWatcher) -> CacheEventBatch:
        """The watcher's first batch, with a snapshot of the cache; its later batches go on from there."""
        begun: asyncio.Future[CacheEventBatch] = self._loop.create_future()

        def begin(snapshot: bytes) -> None:
            if not begun.done():
                begun.set_result(watcher.begin(snapshot))

        def command(_: Scheduler) -> None:
            self.refresh()  # so that no event from before the snapshot comes after it
            self._loop.call_soon_threadsafe(begin, b"".join(self._cache.block_hashes()))

        await asyncio.wrap_future(self.engine.post_command(command))
        return await begun


def log_failure(future: Future[Any]) -> None:
    if future.cancelled() or not (error := future.exception()):
        return
    if not isinstance(error, ServingError):  # Draining: the engine has ended, and what it ran with it
        log.error("a command to the engine failed", exc_info=error)
