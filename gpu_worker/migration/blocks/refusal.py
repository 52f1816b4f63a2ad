"""Why blocks did not arrive: one name for each cause, on the connection and in the error."""

from enum import IntEnum

from octavo.request.errors import TransferFailed


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


def failed(refusal: Refusal, message: str) -> TransferFailed:
    """The error of a ticket that failed for this cause."""
    return TransferFailed(message, cause=refusal.name)


def refusal_of(error: TransferFailed) -> Refusal:
    return Refusal.__members__.get(error.cause, Refusal.GIVEN_UP)
