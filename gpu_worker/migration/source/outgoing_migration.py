"""One migration at its source: from the question whether the sequence can move to the one owner that it has at the end.

    check ─▶ begin ─▶ Prepare ─▶ rounds of blocks ─▶ freeze ─▶ flush ─▶ last blocks ─▶ Finish ─▶ MOVED
               │         │              │              │                                 │
               └─────────┴──────────────┴──────────────┴────▶ abort in the store ◀───────┘ no answer, or an error
                                                              │               │
                                                          ABORTED         COMMITTED
                                                      thaw: STAYED            MOVED

The store decides who owns the sequence. Before Finish is sent the target cannot become the owner. Afterwards only the
store knows: the sequence stays frozen until the store has answered.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import gt

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.blocks.frames import Refusal, failed
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.calls.connection_pool import ConnectionPool, TargetConnection
from gpu_worker.migration.calls.targets import TargetPool, TargetWorker
from gpu_worker.migration.calls.transfer_calls import BranchEnd, MigrationRequest, MigrationReservation
from gpu_worker.migration.source.migration_progress import (
    MigrationOutcome,
    MigrationProgress,
    SequenceGone,
    gone_without_engine,
)
from gpu_worker.migration.source.prompt_sender import PromptSender
from gpu_worker.migration.source.ticket_sender import TicketSender
from gpu_worker.scheduling.block_exchange import PinnedBlocks, WantedBlock, tail_name
from gpu_worker.scheduling.freezer import FrozenSequence
from octavo.process import failpoints
from octavo.process.retry import until_answered
from octavo.request.errors import CannotMove, Code, NoWorkers, ServingError, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.store.base import Store
from octavo.store.calls import MigrateReply, MigrateStatus

log = logging.getLogger(__name__)

MAX_ROUNDS = 3
MAX_LATE_BLOCKS = 4  # of each branch: so many full blocks may be left for the time after the last round
STORE_PATIENCE_S = 1.0  # for calls of which nothing depends on the answer
FREEZE_S = 3.0  # how long the step may take after which the sequence stops
STOP_S = 0.8  # how long a stopped sequence waits for the target, before the migration is given up
MIN_FINISH_S = 0.2
REFUSED_BY_TARGET = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)  # another target may take the sequence


class TargetRefused(Exception):
    """A target has no room, drains, or does not answer. Another one may take the sequence."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class SourceWorker:
    """What migrations ask of the other parts of the worker that sequences leave."""

    incarnation: Incarnation
    store: Store
    blocks: BlockPort
    journal: JournalWriter
    publisher: StepPublisher
    targets: TargetPool
    connections: ConnectionPool


class OutgoingMigration:
    """Moves one sequence. `run` is called once; `progress` has the outcome when it returns."""

    def __init__(
        self,
        worker: SourceWorker,
        sequence_log: SequenceLog,
        target: TargetWorker | None,
        prompt: PromptSender | None = None,
        num_waiting: Callable[[], int] = lambda: 1,
    ) -> None:
        """Without a `target` `worker.targets` says which workers are asked, one after the other.

        With `prompt` the sequence need not have any output yet, nor be started: its blocks leave as they are computed.
        `num_waiting` says how many sequences wait to be started as this one does.
        """
        self._worker = worker
        self._log = sequence_log
        self._target = target
        self._seq_id = sequence_log.sequence.seq_id
        self.epoch = sequence_log.epoch  # of the sequence here
        self.progress = MigrationProgress(self._seq_id, self.epoch)
        self._prompt = prompt
        self._num_waiting = num_waiting
        self._may_be_frozen = False
        self._finish_sent = False
        self._lora = ""  # digest of its adapter
        self._num_asked: list[int] = []  # full blocks of each branch when the target was last asked
        self._stopped_at = 0.0
        self._tail_indexes: dict[int, int] = {}  # in the ticket, by branch
        self._named: set[int] = set()  # indexes in the ticket of the blocks that the target has wanted

    @property
    def num_branches(self) -> int:
        """The branches that still run."""
        return sum(not branch.ended for branch in self._log.branches)

    @property
    def during_prefill(self) -> bool:
        """Whether it may begin before the prompt is computed."""
        return self._prompt is not None

    @property
    def awaits_start(self) -> bool:
        """Whether nothing has been asked of another worker, because the sequence is not started yet."""
        return self._prompt is not None and not self._prompt.started

    def hurry(self) -> None:
        """Ends it if the sequence is not started yet."""
        if self._prompt is not None:
            self._prompt.hurry()

    async def run(self) -> None:
        """Moves the sequence, or says in `progress` why not. Raises nothing but what cancels it."""
        began = time.monotonic()
        outcome = MigrationOutcome.ENDED
        try:
            await self._try_targets()
            outcome = MigrationOutcome.MOVED
        except SequenceGone:
            pass
        except ServingError as error:
            if not self._log.gone:
                outcome, self.progress.error = MigrationOutcome.STAYED, error
        except Exception as error:
            log.exception("sequence %s: its migration failed", self._seq_id)
            outcome = MigrationOutcome.STAYED
            self.progress.error = ServingError(f"the migration failed: {type(error).__name__}: {error}")
        finally:
            self.progress.total_s = time.monotonic() - began
            self.progress.outcome = outcome
            self.progress.done.set()

    async def _try_targets(self) -> None:
        await failpoints.reach("source.asked")
        if self._prompt is not None:
            await self._prompt.wait_for_start(self._num_waiting)
        else:
            with gone_without_engine():
                await self._worker.blocks.check_movable(self._seq_id, self.epoch)
        await failpoints.reach("source.checked")
        candidates = [self._target] if self._target else await self._worker.targets.candidates()
        last: ServingError = NoWorkers("no other worker serves this model and takes sequences")
        for target in candidates:
            self._worker.targets.note_choice(target)
            try:
                await self._move_to(target)
                return
            except TargetRefused as refused:
                last = refused.error
        raise last

    async def _move_to(self, target: TargetWorker) -> None:
        """Returns when the target is the owner. Raises TargetRefused, SequenceGone, or why the sequence stayed."""
        self.progress.begin_target(target.incarnation)
        self._may_be_frozen, self._finish_sent, self._stopped_at = False, False, 0.0
        number = await self._begin(target)
        try:
            await failpoints.reach("source.begun")
            async with self._worker.connections.connect(target) as connection:
                epoch = await self._exchange(connection, number)
        except asyncio.CancelledError:
            self._thaw()
            raise
        except Exception:
            committed = await self._settle(number)
            if committed is None:
                raise
            epoch = committed
        await self._leave(epoch)

    # In the store

    async def _begin(self, target: TargetWorker) -> int:
        """Notes the migration in the store. Returns its number."""
        store, me = self._worker.store, self._worker.incarnation
        while True:
            snapshot = await until_answered(
                lambda: store.read(self._seq_id), patience_s=STORE_PATIENCE_S, what="a migration"
            )
            record = snapshot.record if snapshot else None
            if record is None or (record.state, record.owner, record.epoch) != (SequenceState.RUNNING, me, self.epoch):
                raise SequenceGone
            number, self._lora = record.mig_number + 1, record.lora
            begin = partial(store.mig_begin, self._seq_id, self.epoch, number, target.incarnation)
            reply = await until_answered(begin, patience_s=STORE_PATIENCE_S, what="a migration")
            if reply.status in (MigrateStatus.OK, MigrateStatus.SAME):
                return number
            if reply.status != MigrateStatus.OUTDATED:
                raise SequenceGone

    async def _settle(self, number: int) -> int | None:
        """Ends a migration that has failed at this side.

        Returns the new epoch if the target is the owner all the same, and None if the sequence runs on here. Raises
        SequenceGone if it does not run here either.
        """
        if not self._finish_sent:
            self._thaw()  # the target has not been asked to become the owner, so it does not
        try:
            reply = await until_answered(
                lambda: self._abort(number),
                patience_s=None if self._finish_sent else STORE_PATIENCE_S,
                what=f"the migration of {self._seq_id}",
            )
        except StoreUnavailable:
            return None
        if reply.status is MigrateStatus.COMMITTED:
            return reply.epoch
        if reply.status is MigrateStatus.FENCED:
            self._worker.blocks.drop(self._log.sequence)
            self._worker.publisher.release_before(self._seq_id, reply.epoch)
            raise SequenceGone
        self._thaw()
        if reply.status is not MigrateStatus.ABORTED:
            raise SequenceGone  # what runs on here learns from its next append that the record has ended
        with suppress(StoreUnavailable):
            await failpoints.reach("source.aborted")
        return None

    async def _abort(self, number: int) -> MigrateReply:
        await failpoints.reach("source.aborting")
        return await self._worker.store.mig_abort(self._seq_id, self.epoch, number)

    def _thaw(self) -> None:
        if self._may_be_frozen:
            self._may_be_frozen = False
            self._worker.blocks.thaw(self._seq_id, self.epoch)

    # With the target

    async def _exchange(self, connection: TargetConnection, number: int) -> int:
        """Returns the epoch at which the target is the owner."""
        held = await self._prepare(connection, number)
        blocks = self._worker.blocks
        sender = TicketSender(blocks, connection, held, lambda: self._log.gone, self.progress)
        blocks.slow_down(self._seq_id, self.epoch, leaves=True)
        try:
            await self._copy(connection, held, sender)
            with sender.before_stop():
                return await self._hand_over(connection, held, sender)
        except BaseException:
            self._worker.connections.abort_ticket(connection.target, held.ticket)
            blocks.slow_down(self._seq_id, self.epoch, leaves=False)
            raise
        finally:
            sender.close()

    async def _prepare(self, connection: TargetConnection, number: int) -> MigrationReservation:
        worker = self._worker
        self._num_asked = self._num_full_blocks()
        going = [index for index, branch in enumerate(self._log.branches) if not branch.ended]
        try:
            held = await self._reserve(connection, number)
        except ServingError as error:
            if error.code in REFUSED_BY_TARGET:
                raise TargetRefused(error) from error
            raise
        self.progress.num_blocks = held.num_blocks
        self._named = {each.index for each in held.wanted}
        # A branch that the target alone has seen end leaves open which tail is whose: then none is sent.
        fits = len(going) == len(held.tail_indexes)
        self._tail_indexes = dict(zip(going, held.tail_indexes, strict=True)) if fits else {}
        try:
            await failpoints.reach("source.prepared")
        except ServingError:
            worker.connections.abort_ticket(connection.target, held.ticket)
            raise
        return held

    async def _reserve(self, connection: TargetConnection, number: int) -> MigrationReservation:
        """Calls Prepare, and once more if the target lacked the adapter and got it from here."""
        info = self._worker.blocks.info
        asked = MigrationRequest(
            *(self._seq_id, self.epoch, number, self._worker.incarnation),
            *(info.fingerprint, info.layout, info.numerics),
        )
        try:
            return await connection.client.prepare(asked)
        except ServingError as error:
            if not await self._give_adapter(connection, error):
                raise
        return await connection.client.prepare(asked)

    async def _give_adapter(self, connection: TargetConnection, refusal: ServingError) -> bool:
        """Whether the target lacked the adapter, and has it now."""
        if (
            refusal.metadata.get("cause") != "adapter"
            or (files := self._worker.blocks.adapter_files(self._lora)) is None
        ):
            return False
        try:
            await connection.client.give_adapter(self._lora, self._worker.blocks.info.fingerprint, files.pieces())
        except ServingError as error:
            log.info("sequence %s: the target does not take the adapter: %s", self._seq_id, error)
            return False
        log.info("sequence %s: the target got the adapter %s from here", self._seq_id, self._lora)
        return True

    async def _copy(self, connection: TargetConnection, held: MigrationReservation, sender: TicketSender) -> None:
        """Sends full blocks while the sequence runs, until the target lacks one of each branch at most.

        After the last round a few of each will do: where calls are slow and steps short, so many fill in each round.
        """
        wanted = list(held.wanted)
        if self._prompt is not None:
            wanted = await self._prompt.send_computed(wanted, sender, lambda: self._ask_for_more(connection, held))
        for _ in range(MAX_ROUNDS):
            await sender.send(wanted)
            wanted = await self._extend(connection, held)
            if len(wanted) <= self.num_branches:
                break
        if len(wanted) > MAX_LATE_BLOCKS * self.num_branches:
            text = f"after {MAX_ROUNDS} rounds the target still lacks {len(wanted)} blocks: the link is too slow"
            raise failed(Refusal.GIVEN_UP, text)
        await sender.send(wanted)

    async def _extend(self, connection: TargetConnection, held: MigrationReservation) -> list[WantedBlock]:
        """The blocks that the target lacks, if any have become full since it was last asked. All others are there."""
        if self._log.gone:
            raise SequenceGone
        grown = any(map(gt, self._num_full_blocks(), self._num_asked))  # of a branch that has ended nothing is wanted
        return await self._ask_for_more(connection, held) if grown else []

    async def _ask_for_more(self, connection: TargetConnection, held: MigrationReservation) -> list[WantedBlock]:
        num_full = self._num_full_blocks()
        wanted = await connection.client.extend(held.ticket)
        self._num_asked = num_full
        fresh = {each.index for each in wanted} - self._named
        self._named |= fresh
        self.progress.num_blocks += len(fresh)
        await failpoints.reach("source.extended")
        return wanted

    async def _hand_over(self, connection: TargetConnection, held: MigrationReservation, sender: TicketSender) -> int:
        """Stops the sequence, sends what is left, and makes the target the owner."""
        blocks = self._worker.blocks
        self._may_be_frozen = True
        try:
            with gone_without_engine():
                async with asyncio.timeout(FREEZE_S):
                    frozen, pinned = await blocks.freeze_and_pin(self._seq_id, self.epoch)
        except TimeoutError as error:
            raise failed(Refusal.STALLED, "the step after which the sequence stops takes too long") from error
        self._stopped_at = time.monotonic()
        try:
            with self._thawed_in_time():
                async with asyncio.timeout(STOP_S):
                    await failpoints.reach("source.frozen")
                    await self._worker.journal.wait_until_flushed(at_once=True)
                    await failpoints.reach("source.flushed")
                    tails = self._tails(pinned)
                    self.progress.num_blocks += len(tails)
                    await sender.send(await self._extend(connection, held), tails=list(tails.values()), urgent=True)
                    await failpoints.reach("source.tail_sent")
                    ends = self._branch_ends(frozen, tails)
            await failpoints.reach("source.finishing")
            self._finish_sent = True
            left_s = STOP_S - (time.monotonic() - self._stopped_at)
            finished = await connection.client.finish(held.ticket, ends, max(MIN_FINISH_S, left_s))
        except TimeoutError as error:
            raise failed(Refusal.STALLED, "the sequence would have stood still for too long") from error
        finally:
            blocks.unpin_soon(pinned)
        return finished.epoch

    @contextmanager
    def _thawed_in_time(self) -> Iterator[None]:
        """Lets the sequence run on after STOP_S, although the body of the context may still wait until nothing reads
        its blocks.

        They are pinned until then. Raises TimeoutError if the sequence runs.
        """
        timer = asyncio.get_running_loop().call_later(STOP_S, self._thaw)
        try:
            yield
        finally:
            timer.cancel()
        if not self._may_be_frozen:
            raise TimeoutError

    def _tails(self, pinned: PinnedBlocks) -> dict[int, OutgoingBlock]:
        """The last blocks that are not full, and for which the target has a place, by branch."""
        return {
            branch: OutgoingBlock(index, pinned.blocks[name], name)
            for branch, index in self._tail_indexes.items()
            if (name := tail_name(branch)) in pinned.blocks
        }

    def _branch_ends(self, frozen: FrozenSequence, tails: Collection[int]) -> list[BranchEnd]:
        """Where the branches have stopped. All that was computed must be journalled: the target reads it there."""
        if self._log.gone:
            raise SequenceGone
        ends: list[BranchEnd] = []
        for index, (stopped, logged) in enumerate(zip(frozen.branches, self._log.branches, strict=True)):
            if not logged.ended and logged.num_tokens != stopped.num_tokens:
                text = f"branch {index} has {stopped.num_tokens} tokens, and its journal {logged.num_tokens}"
                raise CannotMove(text, cause="journal")
            scores = tuple(self._log.scores_of(index))
            num_computed = stopped.num_computed if index in tails else 0
            of_prompt = () if index else tuple(self._log.prompt_scores())
            total = stopped.cumulative_logprob
            ends.append(BranchEnd(logged.num_tokens, logged.chain, total, scores, num_computed, of_prompt))
        return ends

    def _num_full_blocks(self) -> list[int]:
        """Full blocks of each branch whose tokens are journalled; 0 of one that has ended.

        The last token of a branch is not computed, so it fills no block.
        """
        num_prompt, size = len(self._log.sequence.prompt), self._worker.blocks.info.block_size
        return [0 if each.ended else (num_prompt + each.num_tokens - 1) // size for each in self._log.branches]

    async def _leave(self, epoch: int) -> None:
        """Lets go of a sequence that another worker owns now, and tells its followers."""
        with suppress(StoreUnavailable):
            await failpoints.reach("source.finished")
        progress, worker = self.progress, self._worker
        if self._stopped_at:
            progress.stopped_s = time.monotonic() - self._stopped_at
        progress.epoch = epoch
        worker.blocks.drop(self._log.sequence)
        worker.publisher.publish_moved(self._seq_id, epoch, progress.target)
        with suppress(StoreUnavailable):
            await failpoints.reach("source.moved")
