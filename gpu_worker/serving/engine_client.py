"""What RPC handlers and the journal writer ask of the engine, and in which order its decisions reach the event loop.

An EngineClient lives on the event loop. Whatever touches the scheduler is a command: it is posted to the engine, which
runs it between two steps, or, if it changes no sequence, as soon as it can. The engine's decisions arrive on the event
loop in the order in which it made them, so a log is opened before the first deltas for it arrive.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gpu_worker.blocks.prefix_cache import DEMOTED
from gpu_worker.engine.engine import Engine, Grant
from gpu_worker.migration.prefix.prefix_fetcher import PrefixFetcher
from gpu_worker.scheduling.block_exchange import BlockExchange, BlockImport, PinnedBlocks, WantedBlock
from gpu_worker.scheduling.freezer import Freezer, FrozenSequence, PromptProgress
from gpu_worker.scheduling.planning.step_budget import StepBudget
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.load import Load
from gpu_worker.scheduling.state.place import Hold
from gpu_worker.scheduling.state.sequence import FINISHED, CarriedScores, Sequence
from gpu_worker.scheduling.state.step import SwapAnswer, SwapOperation
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.admission.announcer import OwnershipAnnouncer
from gpu_worker.serving.admission.beam_texts import BeamTexts
from gpu_worker.serving.admission.trial_queue import TrialQueue
from gpu_worker.serving.cache_watchers import (
    CacheEvent,
    CacheEventBatch,
    CacheSnapshot,
    CacheWatcher,
    CacheWatchers,
    join_events,
)
from gpu_worker.serving.journal.step_publisher import StepPublisher
from gpu_worker.serving.journal.step_subscription import MAX_PENDING_MESSAGES, StepSubscription
from octavo.process.loop import end_tasks, shared
from octavo.request import hashing, validation
from octavo.request.errors import Draining, InvalidArgument, ServingError, StaleEpoch
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionAnswer, AdmissionOutcome

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_GRANT_STEPS = MAX_PENDING_MESSAGES // 2  # steps of finite grants that a Step stream may await at once


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy the worker was at one moment between two steps, how fast it has been, and what it has done so far."""

    load: Load
    num_steps: int
    step_s: float
    prefill_tokens_per_s: float
    phases_s: tuple[float, float, float]  # of all steps: plan, run, commit
    num_step_tokens: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int


class OfferedPrefix(NamedTuple):
    """Leading blocks of a prompt that another worker is said to have."""

    owner: Incarnation
    hashes: list[BlockHash]


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
        """After construction the workload is read in commands and in `refresh` only.

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
        self._exchange = BlockExchange(workload)
        self._freezer = Freezer(workload)
        self._beam_texts = BeamTexts(workload.info)
        self.report = self._measure_load()
        self._loop = asyncio.get_running_loop()
        self.fetcher: PrefixFetcher | None = None  # None: prompts are computed, whoever has their blocks
        self._fetching: set[asyncio.Task[None]] = set()
        self._deciding: dict[tuple[SequenceId, int], asyncio.Task[AdmissionAnswer]] = {}

    # Admission

    async def admit(
        self, admission: Admission, router_id: str, carried: CarriedScores | None = None
    ) -> AdmissionAnswer:
        """The worker's answer.

        `carried` says that the sequence has moved here with its blocks, which an import holds until this returns: it
        runs in the next step. If its blocks, its scores or the room for it are missing, it is computed again.

        An admission that is being decided, or was admitted, is not decided again: a repetition gets the same answer.
        After a refusal it is decided anew. Raises Draining if the engine has ended.
        """
        key = (admission.seq_id, admission.epoch)
        deciding = self._deciding.get(key)
        if deciding is None:
            deciding = asyncio.create_task(self._decide(admission, router_id, carried))
            self._deciding[key] = deciding
            deciding.add_done_callback(lambda _: self._deciding.pop(key))
        answer = await shared(deciding)
        entry = self.publisher.logs.get(admission.seq_id)
        if entry is not None and entry.epoch == admission.epoch:
            self.publisher.add_follower(entry, router_id)
        return answer

    def runs(self, seq_id: SequenceId, epoch: int) -> bool:
        """Whether the sequence runs here at that epoch, or its admission is being decided."""
        entry = self.publisher.logs.get(seq_id)
        return (seq_id, epoch) in self._deciding or (entry is not None and entry.epoch == epoch)

    async def _decide(self, admission: Admission, router_id: str, carried: CarriedScores | None) -> AdmissionAnswer:
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
        if carried is not None and carried.fit(admission):
            sequence.carried = carried
            for branch in sequence.branches:
                branch.hashes = list(carried.hashes.get(branch.index, ()))
        try:
            sequence.beam_text = await self._beam_texts.new_text(sequence.params)
        except ServingError as error:
            return AdmissionAnswer(AdmissionOutcome.NEVER, error.failure())
        if self._announcer is not None and (refused := await self._announcer.refuse_admission(admission)):
            return refused
        offer = self._offered_prefix(sequence, admission)
        command = self._admission_command(sequence, admission, router_id, offer)
        return await asyncio.wrap_future(self.engine.post_command(command))

    def _admission_command(
        self, sequence: Sequence, admission: Admission, router_id: str, offer: OfferedPrefix | None
    ) -> Callable[[Scheduler], AdmissionAnswer]:
        """The command that admits the sequence and opens its log.

        A log of an older epoch is forgotten even if the sequence is refused: the newer epoch fences the older owner.
        """
        outputs = admission.outputs or [[] for _ in range(sequence.params.num_branches)]
        chain = hashing.prompt_chain(sequence.prompt)
        publisher, soon = self.publisher, self._loop.call_soon_threadsafe

        def open_log() -> None:
            sequence_log = publisher.open_log(sequence, chain, outputs, admission.finished_branches, router_id)
            if Hold.CRASHED in sequence.holds:
                self.trials.add(sequence_log)

        def command(scheduler: Scheduler) -> AdmissionAnswer:
            allowed_s = self._worth_waiting(offer) if offer else 0.0
            if allowed_s:
                sequence.holds.add(Hold.AWAITS_PREFIX)
            answer = scheduler.admit(sequence)
            if answer.admitted:
                soon(open_log)
                if offer and allowed_s:
                    soon(self._begin_fetch, sequence, offer, allowed_s)
            else:
                soon(publisher.forget_before, sequence.seq_id, sequence.epoch)
            return answer

        return command

    # Blocks of a prompt that another worker has

    async def stop_fetching(self) -> None:
        """Ends the wait of all sequences for blocks of other workers, which are to be asked for nothing more."""
        self.fetcher = None
        await end_tasks(self._fetching)

    def _offered_prefix(self, sequence: Sequence, admission: Admission) -> OfferedPrefix | None:
        """The blocks of its prompt that another worker is said to have, if the sequence can use them."""
        owner, params = admission.prefix_owner, admission.sampling
        if not (self.fetcher and owner) or admission.suspect or sequence.carried or params.prompt_logprobs is not None:
            return None
        num_tokens = min(admission.prefix_owner_tokens, len(sequence.prompt) - 1)
        return OfferedPrefix(
            owner, hashing.block_hashes(sequence.root, sequence.prompt[:num_tokens], self.info.block_size)
        )

    def _worth_waiting(self, offer: OfferedPrefix) -> float:
        """How long to wait for an offered prefix; 0.0: not at all. Only the engine's thread may call this."""
        if self.fetcher is None:
            return 0.0
        num_blocks, tokens_per_s = self._exchange.num_lacking(offer.hashes), self.engine.times.prefill_tokens_per_s
        return self.fetcher.allowed_s(offer.owner, num_blocks, tokens_per_s)

    def _begin_fetch(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        fetching = asyncio.create_task(self._fetch_prefix(sequence, offer, allowed_s))
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    async def _fetch_prefix(self, sequence: Sequence, offer: OfferedPrefix, allowed_s: float) -> None:
        """Lets the sequence start in its turn, with or without the blocks."""
        try:
            if self.fetcher is not None:
                await self.fetcher.fetch(offer.owner, offer.hashes, allowed_s)
        except Exception:
            log.exception("the prefix of sequence %s is computed", sequence.seq_id)
        finally:
            self._post(lambda scheduler: scheduler.end_wait(sequence))

    def _sequence(self, admission: Admission) -> Sequence:
        """Raises InvalidArgument with the field that is wrong."""
        info = self.info
        validation.validate_admission(
            admission,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            eos_token_ids=info.eos_token_ids,
        )
        root = hashing.root_key(info.fingerprint, info.layout, salt=admission.salt, numerics=info.numerics)
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

    async def swap(self, seq_id: SequenceId, epoch: int, operation: SwapOperation) -> SwapAnswer:
        """Moves a sequence's blocks, or frees them with "drop". Raises what Engine.swap raises.

        The blocks are copied between two steps, before this returns.
        """
        return await asyncio.wrap_future(self.engine.swap(seq_id, epoch, operation))

    def end_holds(self) -> None:
        """Lets the sequences that were moved out on request come back."""
        self._post(lambda scheduler: scheduler.end_holds())

    async def drop_cheapest(
        self, max_sequences: int, max_tokens: int, besides: Collection[SequenceId] = ()
    ) -> list[Sequence]:
        """Stops the sequences that another worker replays with the least work. The caller gives them up in the store.

        At most `max_sequences` with `max_tokens` together, but one at least, and none of `besides`. Raises Draining if
        the engine has ended.
        """

        def command(scheduler: Scheduler) -> list[Sequence]:
            dropped, num_tokens = list[Sequence](), 0
            candidates = [each for each in self._workload.sequences.values() if each.seq_id not in besides]
            for sequence in sorted(candidates, key=replay_cost):
                num_tokens += replay_cost(sequence)[1]
                if len(dropped) >= max_sequences or (dropped and num_tokens > max_tokens):
                    break
                scheduler.drop(sequence)
                dropped.append(sequence)
            return dropped

        return await asyncio.wrap_future(self.engine.post_command(command))

    # What migrations ask. All that is obtained here is given back if its caller is cancelled meanwhile.

    def branch_hashes(self, admission: Admission, known: Seq[Seq[BlockHash]] = ()) -> list[list[BlockHash]]:
        """The hashes of the blocks that the owner of a sequence has computed, of each branch that goes on.

        The last token of a branch is not computed, so it fills no block. `known` is what this has returned when less
        was computed of the same branches. Raises InvalidArgument as `admit` does.
        """
        sequence, size = self._sequence(admission), self.info.block_size
        going = [branch for branch in sequence.branches if branch.state is not FINISHED]
        before = known if len(known) == len(going) else [()] * len(going)  # a branch has ended since
        return [
            hashing.block_hashes(sequence.root, branch.tokens[:-1], size, hashes)
            for branch, hashes in zip(going, before, strict=True)
        ]

    async def check_movable(self, seq_id: SequenceId, epoch: int) -> None:
        """Raises NotFound, StaleEpoch, or CannotMove with the reason why the sequence cannot leave with its blocks."""
        await self._ask(lambda: self._freezer.check_movable(seq_id, epoch))

    async def prompt_progress(self, seq_id: SequenceId, epoch: int) -> PromptProgress:
        """How far the prompt is computed. Raises what `check_movable` raises, unless that passes by itself."""
        return await self._ask(lambda: self._freezer.prompt_progress(seq_id, epoch))

    async def freeze(self, seq_id: SequenceId, epoch: int) -> FrozenSequence:
        """Stops the sequence after the step that runs, and says where. Raises what `check_movable` raises.

        The deltas of that step have been submitted to the journal writer when this returns.
        """
        posted = self.engine.post_command(lambda _: self._freezer.freeze(seq_id, epoch))
        return await self._obtain(posted, lambda _: self.thaw(seq_id, epoch))

    async def freeze_and_pin(self, seq_id: SequenceId, epoch: int) -> tuple[FrozenSequence, PinnedBlocks]:
        """Does what `freeze` does, and pins the last blocks of the branches that are not full, by `tail_name`.

        `unpin_soon` has to come before `thaw`.
        """

        def command(_: Scheduler) -> tuple[FrozenSequence, PinnedBlocks]:
            frozen = self._freezer.freeze(seq_id, epoch)
            return frozen, self._exchange.pin_tails(self._workload.find(seq_id, epoch))

        def undo(obtained: tuple[FrozenSequence, PinnedBlocks]) -> None:
            self.unpin_soon(obtained[1])
            self.thaw(seq_id, epoch)

        return await self._obtain(self.engine.post_command(command), undo)

    def thaw(self, seq_id: SequenceId, epoch: int) -> None:
        """Lets a frozen sequence run on, if it is still here."""
        self._post(lambda _: self._freezer.thaw(seq_id, epoch))

    async def pin_blocks(self, hashes: Seq[BlockHash]) -> PinnedBlocks:
        """Pins those of the blocks that are known on the device: they can be read until `unpin`."""
        return await self._obtain(self._post_block_command(lambda: self._exchange.pin(hashes)), self.unpin_soon)

    async def hottest_blocks(self, limit: int) -> list[BlockHash]:
        """The known blocks on the device that are worth most to others, each before those that continue it."""
        return await self._ask(lambda: self._exchange.hottest(limit))

    async def unpin(self, pinned: PinnedBlocks) -> None:
        """Ends the pins. May be called again."""
        await self._give_back(lambda: self._exchange.unpin(pinned))

    def unpin_soon(self, pinned: PinnedBlocks) -> None:
        """Ends the pins soon, and waits for nothing."""
        self._post_block_command(lambda: self._exchange.unpin(pinned)).add_done_callback(log_failure)

    async def hold_import(self, hashes_per_branch: Seq[Seq[BlockHash]], *, with_tails: bool = False) -> BlockImport:
        """Holds the blocks of a sequence that comes: `branch_hashes` has the argument. Raises OutOfBlocks, CannotMove.

        `with_tails` asks for a block for the tail of each of these branches, too.

        Its blocks stay until `release_import`, which is to be called once the sequence was admitted, or will not be.
        """
        posted = self._post_block_command(lambda: self._exchange.hold(hashes_per_branch, with_tails=with_tails))
        return await self._obtain(posted, self._release_import)

    async def extend_import(self, held: BlockImport, hashes_per_branch: Seq[Seq[BlockHash]]) -> list[WantedBlock]:
        """Holds further blocks; those that are held already may be named again. Returns the further wanted ones.

        Raises OutOfBlocks: the import stays as it was. Raises CannotMove if it was released.
        """
        return await self._ask(lambda: self._exchange.extend(held, hashes_per_branch))

    async def seal_imported(self, held: BlockImport, indexes: Iterable[int]) -> None:
        """Makes wanted blocks known that have arrived whole: nobody may write to them any more."""
        await self._ask(lambda: self._exchange.seal(held, indexes))

    async def release_import(self, held: BlockImport) -> None:
        """Ends the import. Nobody may write to its blocks any more. May be called again."""
        await self._give_back(lambda: self._exchange.release(held))

    def _release_import(self, held: BlockImport) -> None:
        self._post_block_command(lambda: self._exchange.release(held)).add_done_callback(log_failure)

    def _post_block_command(self, command: Callable[[], T]) -> "Future[T]":
        return self.engine.post_block_command(lambda _: command())

    async def _ask(self, command: Callable[[], T]) -> T:
        """What a block command returns."""
        return await asyncio.wrap_future(self._post_block_command(command))

    async def _obtain(self, posted: "Future[T]", give_back: Callable[[T], None]) -> T:
        """What a command obtains that was posted. If the caller is cancelled, what it has obtained is given back."""
        try:
            return await asyncio.wrap_future(posted)
        except asyncio.CancelledError:

            def undo(done: "Future[T]") -> None:
                if not (done.cancelled() or done.exception()):
                    give_back(done.result())

            posted.add_done_callback(undo)
            raise

    async def _give_back(self, command: Callable[[], None]) -> None:
        """Runs the command also if the caller is cancelled. Does nothing if the engine has ended."""
        with contextlib.suppress(Draining):
            await shared(asyncio.create_task(self._ask(command)))

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
        # The wire has no event for a block that leaves the device for the host pool. Routers count such a block as one
        # on the device until it is in neither, or until their next snapshot.
        changes = self._cache.take_events()
        events = join_events(change for change in changes if change[0] != DEMOTED)
        self._loop.call_soon_threadsafe(self._publish, self._measure_load(), events, self._cache.digest)

    def _measure_load(self) -> LoadReport:
        times = self.engine.times
        return LoadReport(
            Load.of(self._workload),
            times.num_steps,
            times.step_s,
            times.prefill_tokens_per_s,
            (times.plan_s, times.run_s, times.commit_s),
            times.num_tokens,
            self.publisher.num_prompt_tokens,
            self.publisher.num_hit_tokens,
        )

    def _publish(self, report: LoadReport, events: Seq[CacheEvent], digest: int) -> None:
        self.report = report
        if events:
            self.watchers.publish_events(events, digest)

    async def begin_watch(self, watcher: CacheWatcher) -> CacheEventBatch:
        """The watcher's first batch, with a snapshot of the cache; its later batches go on from there."""
        begun: asyncio.Future[CacheEventBatch] = self._loop.create_future()

        def begin(snapshot: CacheSnapshot) -> None:
            if not begun.done():
                begun.set_result(watcher.begin(snapshot))

        def command(_: Scheduler) -> None:
            self.refresh()  # so that no event from before the snapshot comes after it
            hashes = (self._cache.block_hashes(), self._cache.host_hashes())
            self._loop.call_soon_threadsafe(begin, CacheSnapshot(*map(b"".join, hashes)))

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
