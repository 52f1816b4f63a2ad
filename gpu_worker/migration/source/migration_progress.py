"""How far a migration has come, and how it ended, for its waiting callers."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation, SequenceId


class MigrationOutcome(Enum):
    """What became of a migration."""

    MOVED = "moved"  # the target runs the sequence
    STAYED = "stayed"  # the sequence runs here as before
    ENDED = "ended"  # the sequence has ended, or another worker has taken it


@dataclass(slots=True)
class MigrationProgress:
    """How far a migration has come. The numbers are about the target that is tried now."""

    seq_id: SequenceId
    epoch: int  # of the sequence: one more once it has moved
    target: Incarnation = Incarnation("")
    rounds: int = 0  # deliveries of blocks that have begun
    num_blocks: int = 0  # of the sequence: full ones, and last ones that travel
    num_sent_blocks: int = 0
    num_sent_bytes: int = 0
    total_s: float = 0.0  # from the beginning to the outcome
    stopped_s: float = 0.0  # from the last step here to the answer of the target
    outcome: MigrationOutcome | None = None  # None: it goes on
    error: ServingError | None = None  # why it stayed
    done: asyncio.Event = field(default_factory=asyncio.Event)  # there is an outcome

    def begin_target(self, target: Incarnation) -> None:
        """Counts anew, for another target."""
        self.target = target
        self.rounds = self.num_blocks = self.num_sent_blocks = self.num_sent_bytes = 0
