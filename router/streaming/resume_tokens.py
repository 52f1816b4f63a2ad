"""Where a client goes on in a stream, and the signed resume tokens that say so on any router of the same store.

The layout of a resume token is in docs/protocol.md.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import HistoryLost, InvalidArgument
from octavo.ids import RequestId

VERSION = 1
MAC_BYTES = 16
HEAD = struct.Struct("<BBB")  # version, bytes of the request id, branches
PLACE = struct.Struct("<IQI")  # next index, chain before it, bytes of text before it


class StreamPlace(NamedTuple):
    """How far a client is in one branch. A client that names an index alone knows neither chain nor text."""

    next_index: int
    chain: int | None = None  # over prompt and output before `next_index`
    text_bytes: int | None = None  # of the text before `next_index`

    def index_within(self, num_tokens: int) -> int:
        """The next index. Raises HistoryLost if a branch of so many tokens ends before it."""
        if self.next_index > num_tokens:
            raise HistoryLost(f"the journal ends before index {self.next_index}: start again with a new request id")
        return self.next_index


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a stream begins: one place per returned branch. A branch without a place begins at index 0."""

    places: Sequence[StreamPlace] = ()
    fresh: bool = False  # this client has nothing yet, so no journal has to be read to go to its place

    def place_of(self, branch: int) -> StreamPlace:
        return self.places[branch] if branch < len(self.places) else StreamPlace(0)

    def check_num_places(self, num_returned: int) -> None:
        """Raises InvalidArgument if there are more places than branches that the request returns."""
        if len(self.places) > num_returned:
            raise InvalidArgument("next_indexes", f"{len(self.places)} of them; this request returns {num_returned}")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The request that a client attaches to, and its places. Branches beyond the last place begin at index 0."""

    request_id: RequestId
    places: Sequence[StreamPlace]  # at most one per returned branch


class ResumeTokens:
    """Makes and reads resume tokens with a key that all routers share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make_token(self, request_id: bytes, places: Sequence[StreamPlace]) -> bytes:
        """`places` has one place per returned branch, with chain and text."""
        body = HEAD.pack(VERSION, len(request_id), len(places)) + request_id
        for place in places:
            body += PLACE.pack(*place)
        return body + self._mac(body)

    def _mac(self, body: bytes) -> bytes:
        """Keyed BLAKE2b is a MAC by itself, at a third of the cost of HMAC. One MAC is computed per event."""
        return hashlib.blake2b(body, digest_size=MAC_BYTES, key=self._key).digest()

    def read_token(self, token: bytes) -> ResumePoint:
        """Raises InvalidArgument if the token was changed, or was made with another key."""
        body, mac = token[:-MAC_BYTES], token[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise InvalidArgument("resume_token", "not one of ours: send the one of the last event, unchanged")
        version, id_bytes, num_places = HEAD.unpack_from(body)
        if version != VERSION:
            raise InvalidArgument("resume_token", f"version {version} is not known to this router")
        start = HEAD.size + id_bytes
        places = [StreamPlace(*PLACE.unpack_from(body, start + i * PLACE.size)) for i in range(num_places)]
        return ResumePoint(RequestId(body[HEAD.size : start].decode()), places)
