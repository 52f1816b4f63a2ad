"""Where a client goes on. Resume tokens: a place in a stream, signed, good on any router of the same store.

Their layout is in docs/protocol.md.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import HistoryLost, InvalidArgument
from octavo.ids import RequestId

VERSION = 1
MAC_BYTES = 16
HEAD = struct.Struct("<BBB")  # version, bytes of the request id, branches
PLACE = struct.Struct("<IQI")  # next index, chain there, bytes of text delivered


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """How far a client is in one branch. Who asks for an index alone knows neither chain nor text."""

    next_index: int
    chain: int | None = None
    text_bytes: int | None = None

    def within(self, num_tokens: int) -> int:
        """The next index; HistoryLost if a branch of so many tokens ends before it."""
        if self.next_index > num_tokens:
            raise HistoryLost(f"the journal ends before index {self.next_index}: start again with a new request id")
        return self.next_index


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a stream begins: one place per branch, missing ones at index 0."""

    places: Sequence[StreamPlace] = ()
    fresh: bool = False  # just accepted: there is nothing to read yet

    def place(self, branch: int) -> StreamPlace:
        return self.places[branch] if branch < len(self.places) else StreamPlace(0)

    def check(self, num_returned: int) -> None:
        if len(self.places) > num_returned:
            raise InvalidArgument("next_indexes", f"{len(self.places)} of them; this request returns {num_returned}")


class ResumeTokens:
    """Makes and reads resume tokens with a key that all routers share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, request_id: bytes, places: Sequence[tuple[int, int, int]]) -> bytes:
        """`places` are (next_index, chain, text_bytes), one per returned branch."""
        body = HEAD.pack(VERSION, len(request_id), len(places)) + request_id
        for place in places:
            body += PLACE.pack(*place)
        return body + self._mac(body)

    def _mac(self, body: bytes) -> bytes:
        """Keyed BLAKE2b is a MAC by itself, and a third of the price of HMAC at one per token."""
        return hashlib.blake2b(body, digest_size=MAC_BYTES, key=self._key).digest()

    def read(self, token: bytes) -> tuple[RequestId, list[StreamPlace]]:
        body, mac = token[:-MAC_BYTES], token[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            raise InvalidArgument("resume_token", "not one of ours: send the one of the last event, unchanged")
        version, id_bytes, num_places = HEAD.unpack_from(body)
        if version != VERSION:
            raise InvalidArgument("resume_token", f"version {version} is not known to this router")
        start = HEAD.size + id_bytes
        places = [StreamPlace(*PLACE.unpack_from(body, start + i * PLACE.size)) for i in range(num_places)]
        return RequestId(body[HEAD.size : start].decode()), places
