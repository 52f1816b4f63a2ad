"""What migrations and fetches ask of the engine: to stop a sequence, and to pin, hold and give back blocks.

It lives on the event loop. All that is obtained here is given back if its caller is cancelled meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from typing import TypeVar

from gpu_worker.engine.adapter_files import AdapterFiles, FilePiece
from gpu_worker.engine.adapter_loader import AdapterLoader
from gpu_worker.engine.command_port import CommandPort, log_failure
from gpu_worker.engine.picture_loader import PictureLoader
from gpu_worker.scheduling.block_exchange import BlockExchange, BlockImport, PinnedBlocks, WantedBlock
from gpu_worker.scheduling.freezer import Freezer, FrozenSequence, PromptProgress
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.standby_blocks import HistoryKey, LastBlocks, SentBlock, StandbyBlocks
from gpu_worker.scheduling.state.sequence import FINISHED, Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import RunnerInfo
from octavo.pictures.picture import parse_pictures
from octavo.process.loop import shared
from octavo.request import hashing, validation
from octavo.request.errors import (
    CannotMove,
    Draining,
    InvalidArgument,
    Loading,
    OutOfBlocks,
    ServingError,
    Unimplemented,
)
from octavo.request.ids import BlockHash, BlockId, SequenceId
from octavo.request.record import Admission

T = TypeVar("T")


@contextlib.contextmanager
def _cannot_move_without(what: str) -> Iterator[None]:
    """Makes CannotMove of errors that do not pass, and that are not of a call's own fields."""
    try:
        yield
    except (Loading, OutOfBlocks, Draining, InvalidArgument):
        raise
    except ServingError as error:
        raise CannotMove(f"its {what} cannot be here: {error.message}", cause=what) from error


class BlockPort:
    """The blocks of this worker, and the sequences that leave or come with theirs."""

    def __init__(
        self,
        port: CommandPort,
        workload: Workload,
        adapters: AdapterLoader | None = None,
        pictures: PictureLoader | None = None,
    ) -> None:
        """Without `adapters` no sequence with one can come, and without `pictures` none that shows some."""
        self.info = workload.info
        self._port = port
        self._workload = workload
        self._adapters = adapters
        self._pictures = pictures
        self._exchange = BlockExchange(workload)
        self._freezer = Freezer(workload)
        self._standby = StandbyBlocks(workload)

    # Sequences that leave

    async def check_movable(self, seq_id: SequenceId, epoch: int) -> None:
        """Raises NotFound, StaleEpoch, or CannotMove with the reason why the sequence cannot leave with its blocks."""
        await self._ask(self._freezer.check_movable, seq_id, epoch)

    async def prompt_progress(self, seq_id: SequenceId, epoch: int) -> PromptProgress:
        """How far the prompt is computed. Raises what `check_movable` raises, unless that passes by itself."""
        return await self._ask(self._freezer.prompt_progress, seq_id, epoch)

    def slow_down(self, seq_id: SequenceId, epoch: int, *, leaves: bool) -> None:
        """While a sequence leaves it has no drafts, so that it does not outrun the blocks that are sent."""
        self._port.tell(lambda _: self._freezer.slow_down(seq_id, epoch, leaves=leaves))

    async def freeze_and_pin(self, seq_id: SequenceId, epoch: int) -> tuple[FrozenSequence, PinnedBlocks]:
        """Stops the sequence after the step that runs, says where, and pins the last blocks of the branches that are
        not full, by `tail_name`. Raises what `check_movable` raises.

        The items of that step have been submitted to the journal writer when this returns. `unpin_soon` has to come
        before `thaw`.
        """

        def command(_: Scheduler) -> tuple[FrozenSequence, PinnedBlocks]:
            frozen = self._freezer.freeze(seq_id, epoch)
            return frozen, self._exchange.pin_tails(self._workload.find(seq_id, epoch))

        def undo(obtained: tuple[FrozenSequence, PinnedBlocks]) -> None:
            self.unpin_soon(obtained[1])
            self.thaw(seq_id, epoch)

        return await obtain(self._port.post(command), undo)

    def thaw(self, seq_id: SequenceId, epoch: int) -> None:
        """Lets a frozen sequence run on, if it is still here."""
        self._port.tell(lambda _: self._freezer.thaw(seq_id, epoch))

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that another worker has. One that has replaced it here is left alone."""
        self._port.tell(lambda scheduler: scheduler.drop(sequence))

    # Blocks that leave

    async def pin_blocks(self, hashes: Seq[BlockHash]) -> PinnedBlocks:
        """Pins those of the blocks that are known on the device: they can be read until `unpin`."""
        return await obtain(self._post(self._exchange.pin, hashes), self.unpin_soon)

    async def hottest_blocks(self, limit: int) -> list[BlockHash]:
        """The known blocks on the device that are worth most to others, each before those that continue it."""
        return await self._ask(self._exchange.hottest, limit)

    @property
    def known_digest(self) -> int:
        """Another number whenever another set of blocks is known here. Any thread may ask."""
        return self._workload.tables.cache.digest

    async def unpin(self, pinned: PinnedBlocks) -> None:
        """Ends the pins. May be called again."""
        await self._give_back(self._exchange.unpin, pinned)

    def unpin_soon(self, pinned: PinnedBlocks) -> None:
        """Ends the pins soon, and waits for nothing."""
        self._post(self._exchange.unpin, pinned).add_done_callback(log_failure)

    # Sequences and blocks that come

    async def bring_adapter(self, admission: Admission) -> None:
        """Brings the adapter of a sequence that is to come into memory. Raises CannotMove if it cannot run here, and
        Loading or OutOfBlocks if it cannot now: the sequence may be tried again.
        """
        with _cannot_move_without("adapter"):
            if admission.lora and self._adapters is None:
                raise Unimplemented("no adapter runs on this worker")
            if self._adapters is not None:
                await self._adapters.bring(admission.lora, admission.lora_source)

    def adapter_files(self, digest: str) -> AdapterFiles | None:
        """The files of an adapter that is here; None: they are not open."""
        return self._adapters.files_of(digest) if self._adapters is not None else None

    async def take_adapter(self, digest: str, pieces: AsyncIterator[FilePiece]) -> None:
        """Brings an adapter into memory whose files another worker sends. Raises as `bring_adapter` does."""
        with _cannot_move_without("adapter"):
            if self._adapters is None:
                raise Unimplemented("no adapter runs on this worker")
            await self._adapters.take_files(digest, pieces)

    async def bring_pictures(self, admission: Admission) -> None:
        """Brings the pictures of a sequence that is to come into memory. Raises as `bring_adapter` does."""
        pictures = parse_pictures(admission.pictures)
        with _cannot_move_without("pictures"):
            if pictures and self._pictures is None:
                raise Unimplemented("no picture is encoded on this worker")
            if self._pictures is not None:
                await self._pictures.bring(admission.seq_id, pictures, admission.salt)

    def branch_hashes(self, admission: Admission, known: Seq[Seq[BlockHash]] = ()) -> list[list[BlockHash]]:
        """The hashes of the blocks that the owner of a sequence has computed, of each branch that goes on.

        The last token of a branch is not computed, so it fills no block. `known` is what this has returned when less
        was computed of the same branches. Raises InvalidArgument with the field that is wrong.
        """
        sequence, size = checked_sequence(admission, self.info), self.info.block_size
        going = [branch for branch in sequence.branches if branch.state is not FINISHED]
        before = known if len(known) == len(going) else [()] * len(going)  # a branch has ended since
        return [
            hashing.block_hashes(sequence.root, branch.tokens[:-1], size, hashes, sequence.shown)
            for branch, hashes in zip(going, before, strict=True)
        ]

    async def hold_import(
        self, hashes_per_branch: Seq[Seq[BlockHash]], *, with_tails: bool = False, to_keep: bool = False
    ) -> BlockImport:
        """Holds the blocks of a sequence that comes: `branch_hashes` has the argument. Raises OutOfBlocks, CannotMove.

        `with_tails` asks for a block for the tail of each of these branches, too. With `to_keep` no sequence comes.

        Its blocks stay until `release_import`, which is to be called once the sequence was admitted, or will not be.
        """

        def release(held: BlockImport) -> None:
            self._post(self._exchange.release, held).add_done_callback(log_failure)

        held = self._port.post_block(
            lambda _: self._exchange.hold(hashes_per_branch, with_tails=with_tails, to_keep=to_keep)
        )
        return await obtain(held, release)

    async def extend_import(self, held: BlockImport, hashes_per_branch: Seq[Seq[BlockHash]]) -> list[WantedBlock]:
        """Holds further blocks; those that are held already may be named again. Returns the further wanted ones.

        Raises OutOfBlocks: the import stays as it was. Raises CannotMove if it was released.
        """
        return await self._ask(self._exchange.extend, held, hashes_per_branch)

    async def seal_imported(self, held: BlockImport, indexes: Iterable[int]) -> None:
        """Makes wanted blocks known that have arrived whole: nobody may write to them any more."""
        await self._ask(self._exchange.seal, held, indexes)

    async def release_import(self, held: BlockImport) -> None:
        """Ends the import. Nobody may write to its blocks any more. May be called again."""
        await self._give_back(self._exchange.release, held)

    # Standbys

    async def histories(self, min_tokens: int, known: Mapping[HistoryKey, int]) -> dict[HistoryKey, list[BlockHash]]:
        """The further hashes of the histories here that other workers are to have: `StandbyBlocks.histories`."""
        return await self._ask(self._standby.histories, min_tokens, known)

    async def stand_by(self, begun: Seq[BlockHash], ended: Seq[BlockHash]) -> None:
        """Keeps the blocks of further hashes, and no longer those of others."""
        await self._ask(self._standby.keep, begun, ended)

    async def read_last(
        self, key: HistoryKey, first: int, num_blocks: int, least: int, read: Callable[[BlockId], bytes]
    ) -> LastBlocks:
        """The last blocks of a history, and the one behind them that is not full: `StandbyBlocks.read_last`."""
        return await self._ask(self._standby.read_last, key, first, num_blocks, least, read)

    async def put_blocks(self, blocks: Seq[SentBlock], write: Callable[[BlockId, bytes], None]) -> bool:
        """Takes in full blocks of histories that are kept. False: there is no room for them."""
        return await self._ask(self._standby.put_blocks, blocks, write)

    async def put_tail(self, tail: SentBlock, ended: Seq[BlockHash], write: Callable[[BlockId, bytes], None]) -> bool:
        """Keeps a tail, and no longer another one. False: there is no room for it."""
        return await self._ask(self._standby.put_tail, tail, ended, write)

    @property
    def num_standby_lost(self) -> int:
        """How often a block that is to be kept for a standby has left device and host pool."""
        return self._workload.tables.cache.num_standby_lost

    async def num_known(self, histories: Seq[Seq[BlockHash]]) -> list[int]:
        """How many leading blocks of each history are here, on the device or in the host pool."""
        return await self._ask(self._standby.num_known, histories)

    def _post(self, function: Callable[..., T], *arguments: object) -> "Future[T]":
        return self._port.post_block(lambda _: function(*arguments))

    async def _ask(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.wrap_future(self._post(function, *arguments))

    async def _give_back(self, function: Callable[..., None], held: object) -> None:
        """Runs the command also if the caller is cancelled. Does nothing if the engine has ended."""
        with contextlib.suppress(Draining):
            await shared(asyncio.create_task(self._ask(function, held)))


async def obtain(posted: "Future[T]", give_back: Callable[[T], None]) -> T:
    """What a command obtains that was posted. If the caller is cancelled, what it has obtained is given back."""
    try:
        return await asyncio.wrap_future(posted)
    except asyncio.CancelledError:

        def undo(done: "Future[T]") -> None:
            if not (done.cancelled() or done.exception()):
                give_back(done.result())

        posted.add_done_callback(undo)
        raise


def checked_sequence(admission: Admission, info: RunnerInfo) -> Sequence:
    """The sequence that the scheduler is to have. Raises InvalidArgument with the field that is wrong."""
    validation.validate_admission(
        admission,
        vocab_size=info.vocab_size,
        context_tokens=info.context_tokens,
        eos_token_ids=info.eos_token_ids,
    )
    info.pictures.check_prompt(admission.prompt, parse_pictures(admission.pictures))
    info.encoder.check_sequence(admission.prompt, admission.salt, admission.sampling)
    root = hashing.root_key(info.fingerprint, info.layout, admission.lora, admission.salt, info.numerics)
    return Sequence.from_admission(admission, root=root, now=time.monotonic())
