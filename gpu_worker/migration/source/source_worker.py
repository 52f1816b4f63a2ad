"""What a migration asks of the other parts of the worker that a sequence leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpu_worker.engine.block_port import BlockPort
from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.calls.connection_pool import ConnectionPool
from octavo.request.errors import NotFound, StaleEpoch
from octavo.request.ids import Incarnation
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


@dataclass(frozen=True, slots=True)
class SourceWorker:
    """The parts of the worker that sequences leave."""

    incarnation: Incarnation
    store: Store
    blocks: BlockPort
    journal: JournalWriter
    publisher: StepPublisher
    connections: ConnectionPool
