"""The frames on a connection between two workers: a header of 32 bytes, then `length` bytes.

    kind u8 | flags u8 | check u16 | length u32 | ticket u64 | place u32 | offset u32 | value u64     little-endian

`check` is the low half of the CRC-32 of the header with 0 in its place: a header is never believed by halves.

    HELLO     target → source  first: place = version; 16 random bytes
    OPEN      source → target  16 random bytes, and the proof that the source knows the secret of the ticket
    OPENED    target → source  the proof that the target knows it, too
    PART      source → target  bytes of block `place` from `offset` on; with LAST, value = the checksum of the block
    CREDIT    target → source  value = bytes of parts that are off the connection now, taken or thrown away
    ACCEPTED  target → source  block `place` is whole; value as of CREDIT
    RESEND    target → source  block `place` has another checksum: send all of it again; value as of CREDIT
    FAILED    target → source  the ticket has ended; place = why, and a message in UTF-8
    CLOSE     source → target  the source gives the ticket up

Tickets are named by the number in them; blocks by their index among the blocks that the target expects.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from octavo.request.errors import InvalidArgument, TransferFailed

VERSION = 1
HEADER = struct.Struct("<BBHIQIIQ")
LAST = 1  # a flag of PART
NONCE_BYTES = 16
PROOF_BYTES = 32
SECRET_BYTES = 32
MOST_PART_BYTES = 2 << 20
MOST_OTHER_BYTES = 1 << 10  # of a frame that is no PART

# The bytes of a block are its layers, one after another (`KvShape`): on a CPU one run of memory per layer, where the
# arena has them; from a GPU one run of pinned memory, into which the block was gathered. None is copied in Python.
Runs = Sequence[memoryview]


class FrameKind(IntEnum):
    """What a frame says."""

    HELLO = 1
    OPEN = 2
    OPENED = 3
    PART = 4
    CREDIT = 5
    ACCEPTED = 6
    RESEND = 7
    FAILED = 8
    CLOSE = 9


KINDS = frozenset(FrameKind)


class Refusal(IntEnum):
    """Why a ticket has failed."""

    UNKNOWN_TICKET = 1  # the target has no such ticket, or it was not opened on this connection
    WRONG_PROOF = 2  # the other side does not know the secret
    TICKET_IN_USE = 3  # it is open on another connection
    EXPIRED = 4  # its time is over
    WRONG_BLOCK = 5  # the target expects no block with this index
    PART_TOO_LARGE = 6
    PART_OUTSIDE = 7  # it ends behind the end of the block
    PART_UNALIGNED = 8  # it does not begin or end where a part may
    PART_OVERLAPS = 9  # some of its bytes were there already
    NO_CHECKSUM = 10  # all bytes of a block are there, and no part said its checksum
    WRONG_CHECKSUM = 11  # a block was wrong each time that it came
    MALFORMED = 12  # a frame that means nothing
    CONNECTION_LOST = 13
    STALLED = 14  # nothing came, or nothing was taken, for too long
    GIVEN_UP = 15  # by the side that could have gone on
    NOT_STORED = 16  # the target could not put a block where it belongs


class BlockFrame(NamedTuple):
    """The header of a frame."""

    kind: FrameKind
    flags: int = 0
    length: int = 0
    ticket: int = 0
    place: int = 0
    offset: int = 0
    value: int = 0

    def encode(self) -> bytes:
        bare = HEADER.pack(self.kind, self.flags, 0, *self[2:])
        return HEADER.pack(self.kind, self.flags, zlib.crc32(bare) & 0xFFFF, *self[2:])

    @classmethod
    def decode(cls, header: bytes | bytearray) -> "BlockFrame":
        """Raises InvalidArgument if the header is damaged, or is not one of this version."""
        kind, flags, check, *rest = HEADER.unpack(header)
        if zlib.crc32(HEADER.pack(kind, flags, 0, *rest)) & 0xFFFF != check:
            raise InvalidArgument("frame.check", "does not fit the header: connect again, the bytes were damaged")
        if kind not in KINDS:
            raise InvalidArgument("frame.kind", f"{kind} is unknown: both workers must run the same version")
        frame = cls(FrameKind(kind), flags, *rest)
        if frame.kind is not FrameKind.PART and frame.length > MOST_OTHER_BYTES:
            raise InvalidArgument("frame.length", f"{frame.length} is more than {MOST_OTHER_BYTES}")
        return frame


def proof(secret: bytes, ticket: int, role: bytes, nonces: bytes) -> bytes:
    """What shows, once, that `role` ("source" or "target") knows the secret of a ticket. `nonces`: of both sides."""
    data = struct.pack("<Q", ticket) + role + nonces
    return hashlib.blake2b(data, key=secret, digest_size=PROOF_BYTES, person=b"octavo.proof.v1").digest()


def checksum_seed(secret: bytes, ticket: int, index: int, name: bytes) -> int:
    """The seed of a block's checksum, which binds the checksum to the ticket, the index and the block's name."""
    data = struct.pack("<QI", ticket, index) + name
    digest = hashlib.blake2b(data, key=secret, digest_size=8, person=b"octavo.seed.v1").digest()
    return int.from_bytes(digest, "little")


def part_of(runs: Runs, offset: int, length: int) -> list[memoryview]:
    """The `length` bytes from `offset` on, without a copy. Fewer, if the runs end before."""
    found: list[memoryview] = []
    for run in runs:
        if length <= 0:
            break
        size = len(run)
        if offset >= size:
            offset -= size
            continue
        found.append(run[offset : offset + length] if offset or length < size else run)
        length -= len(found[-1])
        offset = 0
    return found


def failed(refusal: Refusal, message: str) -> TransferFailed:
    """The error of a ticket that failed for this cause."""
    return TransferFailed(message, cause=refusal.name)


def refusal_of(error: TransferFailed) -> Refusal:
    return Refusal.__members__.get(error.cause, Refusal.GIVEN_UP)
