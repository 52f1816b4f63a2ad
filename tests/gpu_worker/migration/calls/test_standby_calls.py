"""Standby on the wire: it comes as it was sent, and what cannot be right is refused by its field."""

import pytest

from gpu_worker.migration.calls.standby_calls import (
    MOST_HISTORIES,
    MOST_NAMED,
    MOST_SENT_BYTES,
    NamedHistory,
    StandbyRequest,
    block_checksum,
)
from gpu_worker.migration.calls.transfer_calls import standby_to_wire
from gpu_worker.migration.transfer_service import standby_from_wire
from gpu_worker.scheduling.standby_blocks import SentBlock
from octavo.internal.v1 import transfer_pb2
from octavo.request.errors import InvalidArgument
from octavo.request.ids import BlockHash, Incarnation, SequenceId

SEQ = SequenceId(f"{7:032x}")


def test_a_request_comes_as_it_was_sent() -> None:
    histories = [
        NamedHistory(
            SEQ, 0, 3, [BlockHash(bytes(16)), BlockHash(b"x" * 16)], [SentBlock(BlockHash(b"x" * 16), b"one")]
        ),
        NamedHistory(SEQ, 1, 0, [], [], SentBlock(BlockHash(b"t" * 16), b"bytes")),
    ]
    request = StandbyRequest(Incarnation("a"), "weights", "layout", "class", histories, 9)
    assert standby_from_wire(standby_to_wire(request)) == request


HALF = transfer_pb2.SentBlock(hash=bytes(16), content=bytes(MOST_SENT_BYTES // 2 + 1))
DAMAGED = transfer_pb2.SentBlock(hash=bytes(16), content=b"bytes", checksum=1)
OTHER_CONTENT = transfer_pb2.SentBlock(  # that of another block, with its checksum
    hash=bytes(16), content=b"other", checksum=block_checksum(SentBlock(BlockHash(b"o" * 16), b"other"))
)
WHOLE = transfer_pb2.SentBlock(
    hash=bytes(16), content=b"bytes", checksum=block_checksum(SentBlock(BlockHash(bytes(16)), b"bytes"))
)


def history(**changes: object) -> transfer_pb2.NamedHistory:
    return transfer_pb2.NamedHistory(**{"seq_id": SEQ, "hashes": bytes(16), **changes})


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("owner", {"owner": ""}),
        ("histories", {"histories": [history(), history()]}),
        ("histories", {"histories": [history(seq_id=f"{n:032x}") for n in range(MOST_HISTORIES + 1)]}),
        ("histories", {"histories": [history(hashes=bytes(16 * (MOST_NAMED + 1)))]}),
        ("histories[0].seq_id", {"histories": [history(seq_id="no id")]}),
        ("histories[1].hashes", {"histories": [history(), history(branch=1, hashes=bytes(15))]}),
        ("histories[0].branch", {"histories": [history(branch=1 << 20)]}),
        ("histories[0].tail.hash", {"histories": [history(tail=transfer_pb2.SentBlock(hash=b"short"))]}),
        ("histories[0].tail.content", {"histories": [history(tail=DAMAGED)]}),
        ("histories[0].blocks[0].content", {"histories": [history(blocks=[DAMAGED])]}),
        ("histories[0].blocks[0].content", {"histories": [history(blocks=[OTHER_CONTENT])]}),
        ("histories[0].tail.content", {"histories": [history(tail=OTHER_CONTENT)]}),
        ("histories[0].blocks", {"histories": [history(hashes=b"x" * 16, blocks=[WHOLE])]}),
        ("histories[0].blocks", {"histories": [history(blocks=[WHOLE, WHOLE])]}),
        ("histories[0].blocks[1].content", {"histories": [history(hashes=bytes(32), blocks=[HALF, HALF])]}),
        ("histories[1].tail.content", {"histories": [history(blocks=[HALF]), history(branch=1, tail=HALF)]}),
    ],
)
def test_what_cannot_be_right_is_refused_by_its_field(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        standby_from_wire(transfer_pb2.StandbyRequest(**{"owner": "a", "histories": [history()], **changes}))
    assert refused.value.metadata["field"] == field
