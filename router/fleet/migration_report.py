"""What a worker has said of a migration that it began, when the migration is over."""

from dataclasses import dataclass
from enum import Enum, auto

from octavo.request.errors import Failure
from octavo.request.ids import Incarnation


class MigrationEnd(Enum):
    """Where a migration has left its sequence."""

    MOVED = auto()  # the target runs it
    STAYED = auto()  # it runs where it ran; the failure says why
    ENDED = auto()  # it has ended, or another worker has taken it: read the record


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """The end of one migration, with what it has cost."""

    outcome: MigrationEnd
    failure: Failure | None = None
    epoch: int = 0
    target: Incarnation = Incarnation("")
    num_blocks: int = 0  # full blocks of the sequence
    num_sent_blocks: int = 0  # of these, those that the target did not have
    num_sent_bytes: int = 0
    total_ms: float = 0.0
    stopped_ms: float = 0.0  # of these, those without a step

    @property
    def moved(self) -> bool:
        return self.outcome is MigrationEnd.MOVED
