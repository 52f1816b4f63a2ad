"""What a migration asks of the other parts of the worker that a sequence leaves."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.migration.calls.connection_pool import ConnectionPool
from gpu_worker.scheduling.block_exchange import PinnedBlocks
from gpu_worker.scheduling.freezer import FrozenSequence, PromptProgress
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.errors import NotFound, StaleEpoch
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.sampling import TokenScore
from octavo.store.base import Store


class SequenceGone(Exception):
    """The sequence has ended at the source, or has another owner: its migration is over."""


@contextmanager
def gone_without_engine() -> Iterator[None]:
    """Raises SequenceGone where the engine says that it does not have the sequence, or not at this epoch.

    The engine knows that before the log does: the log is gone when the last tokens are journalled.
    """
    try:
        yield
    except (NotFound, StaleEpoch) as error:
        raise SequenceGone from error


class SendingEngine(Protocol):
    """The calls of the engine's client that leaving blocks need."""

    async def pin_blocks(self, hashes: Seq[BlockHash]) -> PinnedBlocks: ...
    async def unpin(self, pinned: PinnedBlocks) -> None: ...


class SourceEngine(SendingEngine, Protocol):
    """The calls of the engine's client that leaving sequences need."""

    async def check_movable(self, seq_id: SequenceId, epoch: int) -> None: ...
    async def prompt_progress(self, seq_id: SequenceId, epoch: int) -> PromptProgress: ...
    async def freeze_and_pin(self, seq_id: SequenceId, epoch: int) -> tuple[FrozenSequence, PinnedBlocks]: ...
    def unpin_soon(self, pinned: PinnedBlocks) -> None: ...
    def thaw(self, seq_id: SequenceId, epoch: int) -> None: ...
    def drop(self, sequence: Sequence) -> None: ...


class LoggedBranch(Protocol):
    """What the journal of one branch holds, as far as the store has answered."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def chain(self) -> int: ...
    @property
    def ended(self) -> bool: ...


class SourceLog(Protocol):
    """The log of the sequence. It is gone once the sequence has ended here."""

    @property
    def sequence(self) -> Sequence: ...
    @property
    def epoch(self) -> int: ...
    @property
    def gone(self) -> bool: ...
    @property
    def branches(self) -> Seq[LoggedBranch]: ...
    def scores_of(self, branch: int) -> Seq[TokenScore]: ...
    def prompt_scores(self) -> Seq[TokenScore]: ...


class SourcePublisher(Protocol):
    """All logs, and the subscriptions that follow them."""

    @property
    def logs(self) -> Mapping[SequenceId, SourceLog]: ...
    def publish_moved(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> None: ...
    def release_before(self, seq_id: SequenceId, epoch: int) -> None: ...


class SourceJournal(Protocol):
    """The journal writer."""

    async def wait_until_flushed(self, *, at_once: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceWorker:
    """The parts of the worker that sequences leave."""

    incarnation: Incarnation
    info: RunnerInfo
    store: Store
    engine: SourceEngine
    journal: SourceJournal
    publisher: SourcePublisher
    connections: ConnectionPool
