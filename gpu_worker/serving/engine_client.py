"""What RPC handlers and the journal writer ask of the engine, and in which order its decisions reach the event loop.

An EngineClient lives on the event loop. Whatever touches the scheduler is a command: it is posted to the engine, which
runs it between two steps. The engine's decisions arrive on the event loop in the order in which it made them, so a log
is opened before the first deltas for it arrive.
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
from gpu_worker.serving.announcer import OwnershipAnnouncer
from gpu_worker.serving.beam_texts import BeamTexts
from gpu_worker.serving.cache_watchers import CacheEvent, CacheEventBatch, CacheWatcher, CacheWatchers, join_events
from gpu_worker.serving.step_publisher import StepPublisher
from gpu_worker.serving.step_subscription import MAX_PENDING_MESSAGES, StepSubscription
from gpu_worker.serving.trial_queue import TrialQueue
from octavo import hashing, validation
from octavo.errors import InvalidArgument, ServingError, StaleEpoch
from octavo.ids import SequenceId
from octavo.record import Admission, AdmissionAnswer, AdmissionOutcome

SwapOperation = Literal["out", "in", "drop"]
log = logging.getLogger(__name__)

MAX_GRANT_STEPS = MAX_PENDING_MESSAGES // 2  # steps of finite grants that a Step stream may await at once


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the worker was at one moment between two steps, and how fast it has been."""

    load: Load
    num_steps: int
    step_s: float
    prefill_tokens_per_s: float


class EngineClient:
    """What the Worker service and the journal writer ask of the engine. It is the journal writer's EngineControl."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        budget: StepBudget,
        publisher: StepPublisher,
        announcer: OwnershipAnnouncer | None = None,
    ) -> None:
        """After construction the workload is read in commands and in `refresh` only: by the engine's thread.

        Without an `announcer` no store knows of this worker.
        """
        self.engine = engine
        self.info = workload.info
        self.max_batch_sequences = workload.config.max_batch_sequences
        self.publisher = publisher
        self.trials = TrialQueue(engine, publisher, announcer)
        self.watchers = CacheWatchers()
        self._announcer = announcer
        self._workload = workload
        self._cache = workload.tables.cache
        self._budget = budget
        self._beam_texts = BeamTexts(workload.info)
        self.report = self._measure_load()
        self._loop = asyncio.get_running_loop()
        self._deciding: dict[tuple[SequenceId, int], asyncio.Task[AdmissionAnswer]] = {}

    # Admission

    async def admit(self, admission: Admission, router_id: str) -> AdmissionAnswer:
        """The worker's answer.

        An admission that is being decided, or was admitted, is not decided again: a repetition gets the same answer.
        After a refusal it is decided anew. Raises Draining if the engine has ended.
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

    def runs(self, seq_id: SequenceId, epoch: int) -> bool:
        """Whether the sequence runs here at that epoch, or its admission is being decided."""
        entry = self.publisher.logs.get(seq_id)
        return (seq_id, epoch) in self._deciding or (entry is not None and entry.epoch == epoch)

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
        try:
            sequence.beam_text = await self._beam_texts.new_text(sequence.params)
        except ServingError as error:
            return AdmissionAnswer(AdmissionOutcome.NEVER, error.failure())
        if self._announcer is not None and (refused := await self._announcer.refuse_admission(admission)):
            return refused
        command = self._admission_command(sequence, admission, router_id)
        return await asyncio.wrap_future(self.engine.post_command(command))

    def _admission_command(
        self, sequence: Sequence, admission: Admission, router_id: str
    ) -> Callable[[Scheduler], AdmissionAnswer]:
        """The command that admits the sequence and opens its log.

        A log of an older epoch is forgotten even if the sequence is refused: the newer epoch fences the older owner.
        """
        outputs = admission.outputs or [[] for _ in range(sequence.params.num_branches)]
        chain = hashing.prompt_chain(sequence.prompt)
        publisher, soon = self.publisher, self._loop.call_soon_threadsafe

        def open_log() -> None:
            sequence_log = publisher.open_log(sequence, chain, outputs, admission.finished_branches, router_id)
            if sequence.alone:
                self.trials.add(sequence_log)

        def command(scheduler: Scheduler) -> AdmissionAnswer:
            answer = scheduler.admit(sequence)
            if answer.admitted:
                soon(open_log)
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
        """Moves a sequence's blocks, or frees them with "drop"; how many. Raises what Scheduler.swap raises.

        The move is decided between two steps. The blocks are copied when the next step runs.
        """
        return await asyncio.wrap_future(
            self.engine.post_command(lambda scheduler: scheduler.swap(seq_id, epoch, operation))
        )

    async def drop_cheapest(self, max_sequences: int, max_tokens: int) -> list[Sequence]:
        """Stops the sequences that another worker replays with the least work. The caller gives them up in the store.

        At most `max_sequences` with `max_tokens` together, but one at least. Raises Draining if the engine has ended.
        """

        def command(scheduler: Scheduler) -> list[Sequence]:
            dropped, num_tokens = list[Sequence](), 0
            for sequence in sorted(self._workload.sequences.values(), key=replay_cost):
                num_tokens += replay_cost(sequence)[1]
                if len(dropped) >= max_sequences or (dropped and num_tokens > max_tokens):
                    break
                scheduler.drop(sequence)
                dropped.append(sequence)
            return dropped

        return await asyncio.wrap_future(self.engine.post_command(command))

    # What routers ask of the loop

    def grant_steps(self, subscription: StepSubscription, steps: int) -> None:
        """Lets the engine run `steps` steps, of each of which this stream is told. 0 is the unlimited grant.

        Raises InvalidArgument if the stream would await more than MAX_GRANT_STEPS.
        """
        if not steps <= MAX_GRANT_STEPS - subscription.num_awaited:
            raise InvalidArgument(
                "grant.steps",
                f"{steps} beside the {subscription.num_awaited} still to come are more than {MAX_GRANT_STEPS}; "
                "grant 0 to let the worker run until Pause",
            )
        subscription.num_awaited += steps
        self.engine.grant_steps(steps, subscription.subscription_id)

    def pause(self) -> None:
        """Takes back all grants, and tells each stream not to await the steps that will not run."""

        def revoke(future: "Future[list[Grant]]") -> None:
            for grant in future.result() if not future.exception() else ():
                if grant.subscription_id is not None:
                    self._loop.call_soon_threadsafe(self.publisher.revoke_steps, grant.subscription_id, grant.steps)

        self.engine.pause().add_done_callback(revoke)

    # What the journal writer asks of one sequence. An admission that has replaced the sequence is left alone.

    def cancel_one(self, sequence: Sequence) -> None:
        """Ends the sequence with CANCELLED."""
        self._post(lambda scheduler: scheduler.cancel(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forgets the sequence without a delta: it has another owner, its record is gone, or its history is lost."""
        self._post(lambda scheduler: scheduler.drop(sequence))

    def end_branch(self, sequence: Sequence, branch: int) -> None:
        """Runs one branch no further: the record says that the branch, or the whole sequence, has ended."""
        self._post(lambda scheduler: scheduler.end_branch(sequence, branch))

    def hold_steps(self, held: bool) -> None:
        """Keeps steps from beginning while `held` is true."""
        self.engine.hold_steps(held)

    def _post(self, command: Callable[[Scheduler], object]) -> None:
        self.engine.post_command(command).add_done_callback(log_failure)

    # Cache events and load

    @property
    def max_batch_tokens(self) -> int:
        """How many tokens a step may run now."""
        return self._budget.tokens

    def refresh(self) -> None:
        """Brings the load, and what the last steps changed in the prefix cache, to the event loop.

        Only the engine's thread may call this, between steps.
        """
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


def replay_cost(sequence: Sequence) -> tuple[bool, int]:
    """What it costs that another worker runs the sequence: whether work is thrown away, and the tokens to compute.

    A sequence that waits here loses nothing, and cannot go on here.
    """
    num_output = sum(branch.num_output for branch in sequence.branches)
    return any(branch.num_computed for branch in sequence.branches), len(sequence.prompt) + num_output


def log_failure(future: Future[Any]) -> None:
    if future.cancelled() or not (error := future.exception()):
        return
    if not isinstance(error, ServingError):  # e.g. Draining: the engine has ended, and so have its sequences
        log.error("a command to the engine failed", exc_info=error)
