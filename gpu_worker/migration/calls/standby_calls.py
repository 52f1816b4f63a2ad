"""The call Standby as plain values, and how these travel."""

from dataclasses import dataclass

from gpu_worker.migration.calls.transfer_calls import HASH_BYTES
from octavo.internal.v1 import transfer_pb2
from octavo.request import limits, validation
from octavo.request.errors import InvalidArgument, Mismatch
from octavo.request.ids import BlockHash, Incarnation, SequenceId

MOST_HISTORIES = 1024  # of one call
MOST_NAMED = 65_536  # hashes of one call


@dataclass(frozen=True, slots=True)
class NamedHistory:
    """What one branch of a sequence has sealed since its buddy was told last."""

    seq_id: SequenceId
    branch: int
    first: int  # how many leading blocks earlier calls have named
    hashes: list[BlockHash]  # of the next ones


@dataclass(frozen=True, slots=True)
class StandbyRequest:
    """All histories that an owner wants kept by one buddy."""

    owner: Incarnation
    fingerprint: str  # of the owner's model
    layout: str  # of a block there
    numerics: str  # its class of numerics
    histories: list[NamedHistory]


@dataclass(frozen=True, slots=True)
class HistoryState:
    """What a buddy has of one history."""

    num_named: int  # leading blocks that it knows by their hashes
    num_held: int  # leading blocks in its prefix cache
    refused: bool = False  # it has no room, and keeps nothing of the history


def standby_to_wire(request: StandbyRequest) -> transfer_pb2.StandbyRequest:
    return transfer_pb2.StandbyRequest(
        owner=request.owner,
        model_fingerprint=request.fingerprint,
        kv_layout=request.layout,
        numerics=request.numerics,
        histories=[
            transfer_pb2.NamedHistory(
                seq_id=each.seq_id, branch=each.branch, first=each.first, hashes=b"".join(each.hashes)
            )
            for each in request.histories
        ],
    )


def standby_from_wire(message: transfer_pb2.StandbyRequest) -> StandbyRequest:
    """The request. Raises InvalidArgument if it names no owner, too much, a branch twice, or hashes that are none."""
    if not message.owner:
        raise InvalidArgument("owner", "is empty: name the incarnation of the worker that runs the sequences")
    if len(message.histories) > MOST_HISTORIES:
        raise InvalidArgument("histories", f"{len(message.histories)} are too many; at most {MOST_HISTORIES}")
    if sum(len(each.hashes) for each in message.histories) > MOST_NAMED * HASH_BYTES:
        raise InvalidArgument("histories", f"they name too many blocks; at most {MOST_NAMED} in a call")
    histories = [_history_from_wire(f"histories[{index}]", each) for index, each in enumerate(message.histories)]
    if len({(each.seq_id, each.branch) for each in histories}) != len(histories):
        raise InvalidArgument("histories", "one branch is named twice: name each once")
    return StandbyRequest(
        Incarnation(message.owner), message.model_fingerprint, message.kv_layout, message.numerics, histories
    )


def _history_from_wire(field: str, message: transfer_pb2.NamedHistory) -> NamedHistory:
    if message.branch >= limits.MAX_N:
        raise InvalidArgument(f"{field}.branch", f"{message.branch}: a sequence has at most {limits.MAX_N} branches")
    if len(message.hashes) % HASH_BYTES:
        raise InvalidArgument(f"{field}.hashes", f"{len(message.hashes)} bytes: a hash has {HASH_BYTES}")
    seq_id = validation.validate_sequence_id(f"{field}.seq_id", message.seq_id)
    starts = range(0, len(message.hashes), HASH_BYTES)
    hashes = [BlockHash(message.hashes[start : start + HASH_BYTES]) for start in starts]
    return NamedHistory(seq_id, message.branch, message.first, hashes)


def states_to_wire(states: list[HistoryState]) -> transfer_pb2.StandbyResponse:
    return transfer_pb2.StandbyResponse(
        states=[
            transfer_pb2.HistoryState(num_named=each.num_named, num_held=each.num_held, refused=each.refused)
            for each in states
        ]
    )


def states_from_wire(message: transfer_pb2.StandbyResponse, num_histories: int) -> list[HistoryState]:
    """The states of so many histories. Raises Mismatch if the buddy has answered for another number."""
    if len(message.states) != num_histories:
        raise Mismatch("the buddy has not answered for each history: it runs another version")
    return [HistoryState(each.num_named, each.num_held, each.refused) for each in message.states]
