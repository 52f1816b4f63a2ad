"""The calls of the Transfer service, as plain values."""

from dataclasses import dataclass

from gpu_worker.scheduling.block_exchange import WantedBlock
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import TokenScore


@dataclass(frozen=True, slots=True)
class MigrationRequest:
    """Asks a target to prepare for a sequence: a migration that has begun in the store, and what its source has."""

    seq_id: SequenceId
    epoch: int  # at the source
    number: int  # of the migration in the record
    source: Incarnation
    fingerprint: str  # of the source's model
    layout: str  # of a block there
    numerics: str = ""  # its class of numerics

    @property
    def key(self) -> tuple[SequenceId, int, int]:
        """What names the migration."""
        return self.seq_id, self.epoch, self.number


@dataclass(frozen=True, slots=True)
class MigrationReservation:
    """What a target holds for a sequence: a ticket on its listener for blocks, and the blocks that it lacks."""

    ticket: int
    secret: bytes
    ttl_ms: int  # after which a ticket ends without a call of it, or a block on its connection
    port: int
    wanted: list[WantedBlock]  # their indexes are those in the ticket
    num_blocks: int  # full blocks of the sequence
    tail_indexes: tuple[int, ...] = ()  # in the ticket, of the tails of the branches that go on for the target


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks another worker for blocks of its prefix cache, on a ticket of the worker that asks."""

    target: Incarnation  # the worker that asks
    fingerprint: str  # of its model
    layout: str  # of a block there
    ticket: int
    secret: bytes
    port: int
    wanted: list[WantedBlock]  # in the order of their prefix
    numerics: str = ""  # its class of numerics


@dataclass(frozen=True, slots=True)
class BranchEnd:
    """Where a branch stopped at the source."""

    num_tokens: int
    chain: int
    cumulative_logprob: float = 0.0
    scores: tuple[TokenScore, ...] = ()  # of its tokens, if the request asks for them
    num_computed: int = 0  # tokens of prompt and output in its full blocks and in the tail that was sent; 0: none was
    prompt_scores: tuple[TokenScore, ...] = ()  # of prompt[1:], with the first branch, if the request asks for them


@dataclass(frozen=True, slots=True)
class FinishedMigration:
    """What a target answers once it owns the sequence."""

    epoch: int
    num_blocks: int  # that arrived for it
