"""The sequences that are on their way to this worker: which ticket is which, and how many there may be.

Every call of a source runs in a task of its own: it goes on if the source stops waiting, so that nothing is left half
done. A call that comes again joins the first one, or gets its answer.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from gpu_worker.engine.adapter_files import FilePiece
from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.migration.blocks.block_listener import BlockListener
from gpu_worker.migration.calls.transfer_calls import (
    BranchEnd,
    FinishedMigration,
    MigrationRequest,
    MigrationReservation,
)
from gpu_worker.migration.target.incoming_migration import AdmitCall, IncomingMigration, unknown_ticket
from gpu_worker.scheduling.block_exchange import WantedBlock
from gpu_worker.steps.runner import BlockMemory
from octavo.process import failpoints
from octavo.process.loop import shared
from octavo.request.errors import (
    CannotMove,
    Draining,
    Mismatch,
    NotFound,
    OutOfBlocks,
    StoreUnavailable,
    TooManyMoves,
)
from octavo.request.ids import Incarnation, SequenceId
from octavo.store.base import Store

T = TypeVar("T")
log = logging.getLogger(__name__)

MOST_TICKETS = 32
IMPORT_SHARE = 0.5  # of the device's blocks, for what comes on all tickets: sequences that run here need the others
ABORT_S = 2.0
CLOSE_S = 2.0
MOST_REMEMBERED = 1024  # migrations that have succeeded, for calls of Finish that come again


class MigrationTarget:
    """Takes sequences from other workers. Lives on the event loop; its listener for blocks has threads of its own.

    Without a `memory` it takes none: there is no prefix cache to put the blocks into, or no journal to read.
    """

    def __init__(
        self,
        store: Store,
        incarnation: Incarnation,
        blocks: BlockPort,
        admit: AdmitCall,
        watch: WorkerWatch,
        memory: BlockMemory | None,
        listener: BlockListener | None,
    ) -> None:
        """`listener` is where blocks come in. It is closed with the target."""
        self._store = store
        self._incarnation = incarnation
        self._blocks = blocks
        self._admit = admit
        self._watch = watch
        self._memory = memory
        self._listener = listener
        self._closed = False
        self._by_key: dict[tuple[SequenceId, int, int], IncomingMigration] = {}  # those that have not ended
        self._migrations: dict[int, IncomingMigration] = {}  # by ticket: those that have not ended, or not answered
        self._finished: OrderedDict[int, FinishedMigration] = OrderedDict()  # by ticket
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_tickets(self) -> int:
        """How many sequences are on their way here."""
        return len(self._migrations)

    async def prepare(self, request: MigrationRequest) -> MigrationReservation:
        """Reserves what a sequence needs here. The same migration gets the same reservation again, until it ends.

        Raises CannotMove, Mismatch, NotFound, OutOfBlocks, Loading, TooManyMoves, InvalidArgument, Draining or
        StoreUnavailable.
        """
        self._refuse_draining()
        memory, listener = self._memory, self._listener
        if memory is None or listener is None:
            raise CannotMove("this worker takes no blocks from others: only their tokens", cause="runner")
        migration = self._by_key.get(request.key)
        if migration is None:
            if len(self._migrations) >= MOST_TICKETS:
                raise TooManyMoves(f"{len(self._migrations)} sequences are on their way to this worker")
            migration = IncomingMigration(
                request, self._incarnation, self._store, self._blocks, self._admit, memory, listener, self._note_ending
            )
            self._by_key[request.key] = self._migrations[migration.number] = migration
            migration.preparing = self._spawn(self._prepare(migration))
        elif migration.request != request:
            text = f"{migration.request.source} has prepared this migration, with other values"
            raise CannotMove(text, cause="owner")
        if migration.preparing is None:
            raise unknown_ticket(migration.number)
        return await outcome_of(migration.preparing)

    async def take_adapter(self, digest: str, fingerprint: str, pieces: AsyncIterator[FilePiece]) -> None:
        """Brings an adapter into memory whose files a source sends.

        Raises CannotMove with the reason, Mismatch, Draining, Loading, OutOfBlocks, or InvalidArgument.
        """
        self._refuse_draining()
        if fingerprint != self._blocks.info.fingerprint:
            raise Mismatch(f"this worker serves {self._blocks.info.fingerprint}, the other one {fingerprint}")
        await self._blocks.take_adapter(digest, pieces)

    async def extend(self, ticket: int) -> list[WantedBlock]:
        """Holds blocks for the tokens that the journal has got, and returns all blocks that have not come.

        Raises NotFound, or what `prepare` raises. After OutOfBlocks the ticket is as it was, unless all tickets hold
        more than their share; then, and after other errors, it has ended.
        """
        return await outcome_of(self._spawn(self._extend(self._find(ticket))))

    async def finish(self, ticket: int, ends: Sequence[BranchEnd]) -> FinishedMigration:
        """Makes this worker the owner, and runs the sequence. Whatever happens, the ticket ends.

        Raises StoreUnavailable where it is not known what the store has done. After any other error this worker has not
        become the owner by this ticket, and does not.
        """
        if finished := self._finished.get(ticket):
            return finished
        migration = self._find(ticket)
        if migration.answer is None:
            migration.answer = asyncio.get_running_loop().create_future()
            self._spawn(self._finish(migration, ends, migration.answer))
        return await shared(migration.answer)

    async def abort(self, ticket: int) -> None:
        """Ends a ticket. Its blocks are free when this returns.

        Raises StoreUnavailable if mig_commit has been sent and not been answered: the store decides.
        """
        if migration := self._migrations.get(ticket):
            ending = migration.begin_end()
            await asyncio.wait([ending], timeout=ABORT_S)
            if not ending.done():
                raise StoreUnavailable(f"ticket {ticket}: the store has not answered mig_commit; ask it by mig_abort")
        await failpoints.reach("target.aborted")

    async def close(self) -> None:
        """Takes no sequence any more, and ends all tickets. When it returns, nothing writes to a block.

        What this worker has become the owner of is admitted before that, or is released, while the store answers.
        """
        self._closed = True
        if endings := [migration.begin_end() for migration in self._migrations.values()]:
            await asyncio.wait(endings, timeout=CLOSE_S)
        left = list(self._tasks)
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self._listener is not None:
            await asyncio.to_thread(self._listener.close)

    # ---- each call in its task -----------------------------------------------------------------------------------

    async def _prepare(self, migration: IncomingMigration) -> MigrationReservation:
        async with self._ended_by_errors(migration):
            reservation = await migration.prepare()
            self._require_share()
            for other in list(self._by_key.values()):  # the store knows this one: one that began earlier is over
                if other.request.seq_id == migration.request.seq_id and other is not migration:
                    other.begin_end()
            return reservation

    async def _extend(self, migration: IncomingMigration) -> list[WantedBlock]:
        async with self._ended_by_errors(migration, harmless=OutOfBlocks):
            self._refuse_draining()
            wanted = await migration.extend()
        async with self._ended_by_errors(migration):
            self._require_share()
        return wanted

    async def _finish(
        self, migration: IncomingMigration, ends: Sequence[BranchEnd], answer: "asyncio.Future[FinishedMigration]"
    ) -> None:
        try:
            async with self._ended_by_errors(migration):
                self._refuse_draining()
                self._finished[migration.number] = await migration.finish(ends, answer)
        except asyncio.CancelledError:
            if not answer.done():
                answer.set_exception(unknown_ticket(migration.number))
            raise
        except Exception as error:  # whoever waits for the answer gets it
            if not answer.done():
                answer.set_exception(error)
        else:
            if len(self._finished) > MOST_REMEMBERED:
                self._finished.popitem(last=False)
        finally:
            self._migrations.pop(migration.number, None)

    @asynccontextmanager
    async def _ended_by_errors(
        self, migration: IncomingMigration, harmless: type[Exception] | tuple[()] = ()
    ) -> AsyncIterator[None]:
        """An error inside ends the ticket, unless it is a harmless one."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, harmless):
                await asyncio.wait([migration.begin_end()])
            if isinstance(error, TimeoutError):
                raise StoreUnavailable("it took too long until the store or the engine answered") from error
            raise

    def _note_ending(self, migration: IncomingMigration, ending: "asyncio.Task[None]") -> None:
        self._by_key.pop(migration.request.key, None)
        self._tasks.add(ending)
        ending.add_done_callback(self._tasks.discard)
        ending.add_done_callback(partial(self._note_end, migration))

    def _note_end(self, migration: IncomingMigration, ending: "asyncio.Task[None]") -> None:
        if migration.answer is None:  # else Finish forgets it, when it has its result
            self._migrations.pop(migration.number, None)
        if not ending.cancelled() and (error := ending.exception()):
            log.error("the end of ticket %d failed", migration.number, exc_info=error)

    def _require_share(self) -> None:
        """Raises OutOfBlocks if the tickets together hold more blocks than they may."""
        num_wanted = sum(other.num_wanted for other in self._migrations.values())
        most = int(IMPORT_SHARE * self._blocks.info.num_blocks)
        if num_wanted > most:
            raise OutOfBlocks(f"{num_wanted} blocks would be on their way here, of at most {most}")

    def _refuse_draining(self) -> None:
        if self._closed or self._watch.draining:
            raise Draining("this worker drains: move the sequence to another one")

    def _find(self, ticket: int) -> IncomingMigration:
        migration = self._migrations.get(ticket)
        if migration is None or (migration.is_ending and migration.answer is None):
            raise unknown_ticket(ticket)
        return migration

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def outcome_of(task: "asyncio.Task[T]") -> T:
    """What the task returns; it goes on if the caller is cancelled. NotFound if it was cancelled: its ticket ended."""
    try:
        return await shared(task)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if task.cancelled() and not (current and current.cancelling()):
            raise NotFound("the ticket has ended meanwhile: begin another migration") from None
        raise
