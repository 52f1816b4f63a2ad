"""One sequence on its way to this worker: its ticket from Prepare to the end.

    open        Prepare has answered; blocks come in. Abort, expiry, a lost connection or an error ends it.
    committing  mig_commit has been sent: the store decides, and nothing else ends it.
    over        the sequence is admitted here, or the store has refused: no block is held any more.

Lives on the event loop.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.calls.transfer_calls import (
    BranchEnd,
    FinishedMigration,
    MigrationRequest,
    MigrationReservation,
    require_same_model,
)
from gpu_worker.migration.target.incoming_blocks import IncomingBlocks
from gpu_worker.migration.target.incoming_history import IncomingHistory
from gpu_worker.scheduling.block_exchange import BlockImport, WantedBlock
from gpu_worker.scheduling.state.sequence import CarriedScores, CarriedTail
from gpu_worker.steps.runner import BlockMemory
from octavo.process import failpoints
from octavo.process.retry import until_answered
from octavo.request.errors import CannotMove, Mismatch, NotFound, ServingError, StoreUnavailable, TransferFailed
from octavo.request.ids import BlockHash, Incarnation
from octavo.request.record import Admission, AdmissionAnswer
from octavo.store.base import Store
from octavo.store.calls import MigrateReply, MigrateStatus

log = logging.getLogger(__name__)

TTL_S = 4.0  # after which a ticket ends without a call of it, or a block on its connection
PREPARE_S = 3.0  # a reservation takes no longer
VERIFY_S = 3.0  # nor does what Finish does before the commit
COMMIT_PATIENCE_S = 1.5  # so long the source is kept waiting for the store, and the blocks are held
ADMIT_S = 3.0


AdmitCall = Callable[[Admission, str, CarriedScores | None], Awaitable[AdmissionAnswer]]


class IncomingMigration:
    """The calls of one migration, one after another, and its end. Only `MigrationTarget` makes and calls it."""

    def __init__(
        self,
        request: MigrationRequest,
        incarnation: Incarnation,
        store: Store,
        blocks: BlockPort,
        admit: AdmitCall,
        memory: BlockMemory,
        listener: BlockListener,
        on_ending: "Callable[[IncomingMigration, asyncio.Task[None]], None]",
    ) -> None:
        self.request = request
        self.number = secrets.randbits(64)
        self.preparing: asyncio.Task[MigrationReservation] | None = None  # the call of Prepare
        self.answer: asyncio.Future[FinishedMigration] | None = None  # of Finish, from its first call on
        self._incarnation = incarnation
        self._store = store
        self._block_port = blocks
        self._admit_sequence = admit
        self._listener = listener
        self._blocks = IncomingBlocks(self.number, blocks, memory, listener, TTL_S, self._note_loss)
        self._on_ending = on_ending
        self._history = IncomingHistory(store, request, incarnation)
        self._hashes: list[list[BlockHash]] = []  # of each branch that goes on, as far as the journals were read
        self._lock = asyncio.Lock()
        self._calls: set[asyncio.Task[object]] = set()  # under way, and harmless to cancel
        self._ending: asyncio.Task[None] | None = None

    @property
    def num_wanted(self) -> int:
        """How many blocks were taken for the blocks that are to come."""
        held = self._blocks.held
        return len(held.wanted) + len(held.tails) if held else 0

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    # ---- Prepare and Extend --------------------------------------------------------------------------------------

    async def prepare(self) -> MigrationReservation:
        """Reads the record, and holds the blocks of the sequence. After any error its caller ends it."""
        async with self._call(), asyncio.timeout(PREPARE_S):
            await failpoints.reach("target.prepare")
            request = self.request
            if request.source == self._incarnation:
                raise CannotMove("the source is this worker: nothing has to move", cause="target")
            require_same_model(self._block_port.info, request.fingerprint, request.layout, request.numerics)
            await self._history.read_all()
            admission = self._history.admission(request.epoch)
            self._require_movable(admission)
            await self._block_port.bring_adapter(admission)
            await self._block_port.bring_pictures(admission)
            self._hashes = self._block_port.branch_hashes(admission)
            held = await self._blocks.hold(self._hashes, going_branches(admission))
            await failpoints.reach("target.held")
            wanted = self._blocks.open_ticket()
            await failpoints.reach("target.prepared")
            ttl_ms, port, secret = int(TTL_S * 1000), self._listener.port, self._blocks.secret
            tails = tuple(self._blocks.tail_indexes.values())
            return MigrationReservation(self.number, secret, ttl_ms, port, wanted, held.num_blocks, tails)

    async def extend(self) -> list[WantedBlock]:
        """Holds blocks for the tokens that the journals have got meanwhile.

        OutOfBlocks changes nothing; other errors end the migration.
        """
        async with self._call():
            self._open_import()
            await failpoints.reach("target.extend")
            self._blocks.refresh()
            await self._history.read_more()
            wanted = await self._blocks.extend(self._update_hashes())
            await failpoints.reach("target.extended")
            return wanted

    def _update_hashes(self) -> list[list[BlockHash]]:
        """The hashes of all full blocks, after the journals were read. What is known already is not computed again."""
        admission = self._history.admission(self.request.epoch)
        self._hashes = self._block_port.branch_hashes(admission, self._hashes)
        return self._hashes

    def _require_movable(self, admission: Admission) -> None:
        record, params, window = self._history.record, admission.sampling, self._block_port.info.window
        name = f"sequence {record.seq_id}"
        if record.model != self.request.fingerprint:
            raise Mismatch(f"{name} belongs to model {record.model}, not to {self.request.fingerprint}")
        if params.beam_width:
            raise CannotMove(f"{name} is a beam search, whose state is in no journal", cause="beams")
        if record.crashes:
            raise CannotMove(f"{name} is suspected of killing workers: it is replayed", cause="suspect")
        longest = len(admission.prompt) + max(map(len, admission.outputs), default=0)
        if window and longest > window:
            raise CannotMove(f"{name} has passed the window of the model: its first blocks are gone", cause="window")

    def _note_loss(self, error: TransferFailed) -> None:
        """The ticket has ended, and not by this worker."""
        if self.answer is None:
            log.info("sequence %s does not move here: %s", self.request.seq_id, error.message)
            self.begin_end()

    # ---- Finish --------------------------------------------------------------------------------------------------

    async def finish(self, ends: Sequence[BranchEnd], answer: "asyncio.Future[FinishedMigration]") -> FinishedMigration:
        """Takes the sequence over. `answer` has the result as soon as the sequence is admitted.

        Raises ServingError: the store has not made this worker the owner, and will not. If the store is away, `answer`
        gets StoreUnavailable, and this returns or raises when the store has answered.
        """
        async with self._call() as this_call:
            held = self._open_import()
            async with asyncio.timeout(VERIFY_S):
                await failpoints.reach("target.finish")
                await self._verify(held, ends)
            self._calls.discard(this_call)  # from here on it is not cancelled: the store decides
            reply = await self._commit(held, answer)
            if reply.status not in (MigrateStatus.OK, MigrateStatus.SAME):
                text = f"sequence {self.request.seq_id}: the store answers {reply.status} to mig_commit"
                raise CannotMove(text, cause=reply.status.lower())
            await self._run_here(held, reply.epoch, ends)
        finished = FinishedMigration(reply.epoch, len(held.wanted) + len(self._blocks.arrived_tails))
        self.begin_end()
        with contextlib.suppress(StoreUnavailable):
            await failpoints.reach("target.admitted")
        if not answer.done():
            answer.set_result(finished)
        return finished

    async def _verify(self, held: BlockImport, ends: Sequence[BranchEnd]) -> None:
        """Raises ServingError unless all blocks are here, and the journals have the tokens of the source."""
        self._blocks.close_ticket()
        await self._history.read_more()
        self._history.require_ends(ends, self._block_port.info.block_size)
        await self._blocks.wait_until_sealed()
        hashes = self._update_hashes()
        if not all(map(held.hashes.issuperset, hashes)):
            await self._block_port.extend_import(held, hashes)  # it may be here, as part of another sequence
        if held.missing:
            text = f"sequence {self.request.seq_id}: {len(held.missing)} of its {held.num_blocks} blocks have not come"
            raise CannotMove(text, cause="missing")
        await failpoints.reach("target.verified")

    async def _commit(self, held: BlockImport, answer: "asyncio.Future[FinishedMigration]") -> MigrateReply:
        """The store's answer. The source is told and the blocks are let go if that takes long."""
        request = self.request

        async def commit_once() -> MigrateReply:
            await failpoints.reach("target.commit")
            lengths = self._history.num_tokens
            reply = await self._store.mig_commit(
                request.seq_id, request.epoch, request.number, self._incarnation, lengths
            )
            await failpoints.reach("target.committed")
            return reply

        committing = asyncio.create_task(until_answered(commit_once, what="commit of a migration"))
        try:
            await asyncio.wait([committing], timeout=COMMIT_PATIENCE_S)
            if not committing.done():
                text = f"sequence {request.seq_id}: the store has not answered the commit; ask it by mig_abort"
                answer.set_exception(StoreUnavailable(text))
                await self._block_port.release_import(held)
            return await committing
        finally:
            committing.cancel()

    async def _run_here(self, held: BlockImport, epoch: int, ends: Sequence[BranchEnd]) -> None:
        """Admits the sequence, which this worker owns now. If that fails, another worker replays it."""
        seq_id, why = self.request.seq_id, "no answer"
        scores = tuple(end.scores for end in ends) if any(end.scores for end in ends) else ()
        totals, prompt_scores = tuple(end.cumulative_logprob for end in ends), ends[0].prompt_scores
        going = going_branches(self._history.admission(epoch))
        hashes = dict(zip(going, self._hashes, strict=True))
        carried = CarriedScores(totals, scores, self._tails(held, ends), prompt_scores, hashes)

        async def admit_once() -> AdmissionAnswer:
            answer = await self._admit_sequence(self._history.admission(epoch), "", carried)
            if answer.failure is not None and answer.failure.reason == StoreUnavailable.reason:
                raise StoreUnavailable(answer.failure.message)
            return answer

        try:
            async with asyncio.timeout(ADMIT_S):
                await failpoints.reach("target.admit")
                answer = await until_answered(admit_once, what="admission of a sequence that has moved here")
            if answer.admitted:
                log.info("sequence %s has moved here at epoch %d; %d blocks came", seq_id, epoch, self.num_wanted)
                return
            why = answer.failure.message if answer.failure else str(answer.outcome)
        except (ServingError, TimeoutError) as error:
            why = str(error) or why  # a timeout has no text
        log.warning("sequence %s has moved here and cannot run: back into the queue: %s", seq_id, why)
        await self._block_port.release_import(held)

        async def requeue_once() -> bool:
            await failpoints.reach("target.requeue")
            return await self._store.requeue(seq_id, epoch, f"it has moved and cannot run: {why}")

        await until_answered(requeue_once, what="release of a sequence that has moved here")

    def _tails(self, held: BlockImport, ends: Sequence[BranchEnd]) -> dict[int, CarriedTail]:
        """The blocks that were kept for tails, by branch. One that has not come, or is not named, is of no use."""
        arrived = self._blocks.arrived_tails
        return {
            branch: CarriedTail(held.tails[index], ends[branch].num_computed if index in arrived else 0)
            for branch, index in self._blocks.tail_indexes.items()
        }

    # ---- the end -------------------------------------------------------------------------------------------------

    def begin_end(self) -> "asyncio.Task[None]":
        """Ends the ticket, unless `mig_commit` has been sent: then the store's answer does. The task ends with it."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
            self._on_ending(self, self._ending)
        return self._ending

    async def _end(self) -> None:
        for call in list(self._calls):
            call.cancel()
        async with self._lock:  # after the call that is cancelled, or that commits
            await self._blocks.end()

    def _open_import(self) -> BlockImport:
        if self._blocks.held is None or not self._blocks.is_open:
            raise unknown_ticket(self.number)
        return self._blocks.held

    @contextlib.asynccontextmanager
    async def _call(self) -> "AsyncIterator[asyncio.Task[object]]":
        """One call at a time, which `begin_end` cancels. Raises NotFound if the ticket has ended."""
        this_call = asyncio.current_task()
        if this_call is None:
            raise RuntimeError("a call runs in a task")
        self._calls.add(this_call)
        try:
            async with self._lock:
                if self._ending is not None:
                    raise unknown_ticket(self.number)
                yield this_call
        finally:
            self._calls.discard(this_call)


def going_branches(admission: Admission) -> list[int]:
    """The branches of the record that have not ended."""
    return [branch for branch in range(admission.sampling.num_branches) if branch not in admission.finished_branches]


def unknown_ticket(number: int) -> NotFound:
    return NotFound(f"ticket {number} is unknown here, or has ended: this worker does not become the owner by it")
