"""The call Standby as plain values."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_worker.migration.blocks.checksum import BlockChecksum
from gpu_worker.scheduling.standby_blocks import SentBlock
from octavo.request.ids import BlockHash, Incarnation, SequenceId

MOST_HISTORIES = 1024  # of one call
MOST_NAMED = 65_536  # hashes of one call
MOST_SENT_BYTES = 4 << 20  # of the blocks that come with a call: others are fetched


@dataclass(frozen=True, slots=True)
class NamedHistory:
    """What one branch of a sequence has sealed since its buddy was told last."""

    seq_id: SequenceId
    branch: int
    first: int  # how many leading blocks earlier calls have named
    hashes: list[BlockHash]  # of the next ones
    blocks: list[SentBlock] = field(default_factory=list)  # the last of these, if they need not be fetched
    tail: SentBlock | None = None  # the block after these

    @property
    def sent(self) -> list[SentBlock]:
        return self.blocks if self.tail is None else [*self.blocks, self.tail]


@dataclass(frozen=True, slots=True)
class StandbyRequest:
    """All histories that an owner wants kept by one buddy."""

    owner: Incarnation
    fingerprint: str  # of the owner's model
    layout: str  # of a block there
    numerics: str  # its class of numerics
    histories: list[NamedHistory]
    number: int = 0  # rises with each call: one that comes after a later one changes nothing


@dataclass(frozen=True, slots=True)
class HistoryState:
    """What a buddy has of one history."""

    num_named: int  # leading blocks that it knows by their hashes
    num_held: int  # leading blocks in its prefix cache
    refused: bool = False  # it has no room, and keeps nothing of the history


def num_sent_bytes(histories: Iterable[NamedHistory]) -> int:
    """Of the blocks that come with the call."""
    return sum(len(block.content) for each in histories for block in each.sent)


def block_checksum(block: SentBlock) -> int:
    """By which the buddy knows that a block has come whole."""
    checksum = BlockChecksum(int.from_bytes(block.name[:8], "little"))
    checksum.add_part(0, [memoryview(block.content)])
    return checksum.digest(len(block.content))
