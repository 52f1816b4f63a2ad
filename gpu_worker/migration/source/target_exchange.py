"""What the source of a migration and one target tell each other, from Prepare to Finish."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import gt

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.blocks.frames import Refusal, failed
from gpu_worker.migration.blocks.outgoing_ticket import OutgoingBlock
from gpu_worker.migration.calls.connection_pool import ConnectionPool, TargetConnection
from gpu_worker.migration.calls.targets import TargetPool
from gpu_worker.migration.calls.transfer_calls import BranchEnd, MigrationRequest, MigrationReservation
from gpu_worker.migration.source.migration_progress import MigrationProgress, SequenceGone, gone_without_engine
from gpu_worker.migration.source.prompt_sender import PromptSender
from gpu_worker.migration.source.ticket_sender import TicketSender
from gpu_worker.scheduling.block_exchange import PinnedBlocks, WantedBlock, tail_name
from gpu_worker.scheduling.freezer import FrozenSequence
from octavo.process import failpoints
from octavo.request.errors import CannotMove, Code, ServingError
from octavo.request.ids import Incarnation
from octavo.store.base import Store

log = logging.getLogger(__name__)

MAX_ROUNDS = 3
MAX_LATE_BLOCKS = 4  # of each branch: so many full blocks may be left for the time after the last round
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


class TargetExchange:
    """The attempt to move a sequence to one target. `run` is called once, and may leave the sequence frozen."""

    def __init__(
        self,
        worker: SourceWorker,
        sequence_log: SequenceLog,
        number: int,
        lora: str,
        prompt: PromptSender | None,
        progress: MigrationProgress,
    ) -> None:
        """`number`: the migration's in the store; `lora`: the digest of the sequence's adapter."""
        self._worker = worker
        self._log = sequence_log
        self._seq_id, self._epoch = sequence_log.sequence.seq_id, sequence_log.epoch
        self._number = number
        self._lora = lora
        self._prompt = prompt
        self._progress = progress
        self._may_be_frozen = False
        self.finish_sent = False  # from then on only the store knows who owns the sequence
        self.stopped_at = 0.0  # when the sequence has; 0: it has not
        self._num_asked: list[int] = []  # full blocks of each branch when the target was last asked
        self._tail_indexes: dict[int, int] = {}  # in the ticket, by branch
        self._named: set[int] = set()  # indexes in the ticket of the blocks that the target has wanted

    async def run(self, connection: TargetConnection) -> int:
        """Returns the epoch at which the target is the owner. Raises TargetRefused or SequenceGone, too."""
        held = await self._prepare(connection)
        blocks = self._worker.blocks
        sender = TicketSender(blocks, connection, held, lambda: self._log.gone, self._progress)
        blocks.slow_down(self._seq_id, self._epoch, leaves=True)
        try:
            await self._copy(connection, held, sender)
            with sender.before_stop():
                return await self._hand_over(connection, held, sender)
        except BaseException:
            self._worker.connections.abort_ticket(connection.target, held.ticket)
            blocks.slow_down(self._seq_id, self._epoch, leaves=False)
            raise
        finally:
            sender.close()

    def thaw(self) -> None:
        """Lets the sequence run on here, if it may have stopped."""
        if self._may_be_frozen:
            self._may_be_frozen = False
            self._worker.blocks.thaw(self._seq_id, self._epoch)

    async def _prepare(self, connection: TargetConnection) -> MigrationReservation:
        worker = self._worker
        self._num_asked = self._num_full_blocks()
        going = [index for index, branch in enumerate(self._log.branches) if not branch.ended]
        try:
            held = await self._reserve(connection)
        except ServingError as error:
            if error.code in REFUSED_BY_TARGET:
                raise TargetRefused(error) from error
            raise
        self._progress.num_blocks = held.num_blocks
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

    async def _reserve(self, connection: TargetConnection) -> MigrationReservation:
        """Calls Prepare, and once more if the target lacked the adapter and got it from here."""
        info = self._worker.blocks.info
        asked = MigrationRequest(
            *(self._seq_id, self._epoch, self._number, self._worker.incarnation),
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
            if len(wanted) <= self._log.num_running:
                break
        if len(wanted) > MAX_LATE_BLOCKS * self._log.num_running:
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
        self._progress.num_blocks += len(fresh)
        await failpoints.reach("source.extended")
        return wanted

    async def _hand_over(self, connection: TargetConnection, held: MigrationReservation, sender: TicketSender) -> int:
        """Stops the sequence, sends what is left, and makes the target the owner."""
        blocks = self._worker.blocks
        self._may_be_frozen = True
        try:
            with gone_without_engine():
                async with asyncio.timeout(FREEZE_S):
                    frozen, pinned = await blocks.freeze_and_pin(self._seq_id, self._epoch)
        except TimeoutError as error:
            raise failed(Refusal.STALLED, "the step after which the sequence stops takes too long") from error
        self.stopped_at = time.monotonic()
        try:
            with self._thawed_in_time():
                async with asyncio.timeout(STOP_S):
                    await failpoints.reach("source.frozen")
                    await self._worker.journal.wait_until_flushed(at_once=True)
                    await failpoints.reach("source.flushed")
                    tails = self._tails(pinned)
                    self._progress.num_blocks += len(tails)
                    await sender.send(await self._extend(connection, held), tails=list(tails.values()), urgent=True)
                    await failpoints.reach("source.tail_sent")
                    ends = self._branch_ends(frozen, tails)
            await failpoints.reach("source.finishing")
            self.finish_sent = True
            left_s = STOP_S - (time.monotonic() - self.stopped_at)
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
        timer = asyncio.get_running_loop().call_later(STOP_S, self.thaw)
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
