"""Where a client goes on in a stream, and the signed resume tokens that say so on any router of the same store.

The layout of a resume token is in docs/protocol-reference.md.
"""

import hashlib
import hmac
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.request.errors import ForeignToken, HistoryLost, InvalidArgument
from octavo.request.ids import RequestId
from octavo.text.stop import TextStream

VERSION = 3
MAC_BYTES = 16
HEAD = struct.Struct("<B4sQIBB")  # version, key id, generation, time in seconds, bytes of the request id, branches
PLACE = struct.Struct("<IQI")  # next index, chain before it, bytes of text before it
TENANT_HEAD = struct.Struct("<H")  # bytes of the tenant's name, which stands before the body under the MAC


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

    def history(self, output: Sequence[int], text: TextStream) -> tuple[Sequence[int], str]:
        """The tokens of an output before the place, and what the client has of their text."""
        tokens = output[: self.next_index]
        shown = text.push(tokens).text
        return tokens, shown if self.text_bytes is None else shown.encode()[: self.text_bytes].decode(errors="ignore")


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
    # Of the token: the store's generation, and when it was made. Both are 0 where the client has named the request.
    generation: int = 0
    made_s: int = 0

    def is_younger_than(self, seconds: float) -> bool:
        """Whether a token was made so short a time ago, by the clocks of routers."""
        return time.time() - self.made_s < seconds


class ResumeTokens:
    """Makes resume tokens with the key that all routers of a store share, and reads those of the last keys it had."""

    MAX_KEYS = 4

    def __init__(self, key: bytes, generation: int = 0) -> None:
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()  # by key id, the oldest first
        self.use_key(key, generation)

    def use_key(self, key: bytes, generation: int) -> None:
        """Makes tokens with this key from now on. The store has it in that generation."""
        self._key, self._key_id, self._generation = key, key_id(key), generation
        self._keys[self._key_id] = key
        self._keys.move_to_end(self._key_id)
        while len(self._keys) > self.MAX_KEYS:
            self._keys.popitem(last=False)

    def make_token(self, request_id: bytes, places: Sequence[StreamPlace], tenant: str = "") -> bytes:
        """`places` has one place per returned branch, with chain and text. Only that tenant can use the token."""
        now = int(time.time())
        body = HEAD.pack(VERSION, self._key_id, self._generation, now, len(request_id), len(places)) + request_id
        for place in places:
            body += PLACE.pack(*place)
        return body + mac(self._key, owned_body(body, tenant))

    def read_token(self, token: bytes, tenant: str = "") -> ResumePoint:
        """Raises ForeignToken for another key or version, InvalidArgument unless this tenant's token is unchanged."""
        if len(token) < HEAD.size + MAC_BYTES:
            raise InvalidArgument("resume_token", "too short: send the one of the last event, unchanged")
        version, name, generation, made_s, id_bytes, num_places = HEAD.unpack_from(token)
        if version != VERSION or name not in self._keys:
            raise ForeignToken(
                "resume_token: made with a key or in a format that this store's routers do not have: attach by request "
                "id and next indexes"
            )
        body, start = token[:-MAC_BYTES], HEAD.size + id_bytes
        is_whole = len(body) == start + num_places * PLACE.size
        if not is_whole or not hmac.compare_digest(token[-MAC_BYTES:], mac(self._keys[name], owned_body(body, tenant))):
            raise InvalidArgument("resume_token", "not one of ours: send the one of the last event, unchanged")
        places = [StreamPlace(*PLACE.unpack_from(body, start + i * PLACE.size)) for i in range(num_places)]
        return ResumePoint(RequestId(body[HEAD.size : start].decode()), places, generation, made_s)


def owned_body(body: bytes, tenant: str) -> bytes:
    """What the MAC is over. The name's length stands first, so no other name and body make the same bytes."""
    name = tenant.encode()
    return TENANT_HEAD.pack(len(name)) + name + body


def key_id(key: bytes) -> bytes:
    """Tells the keys of a store apart, and tells nothing about them."""
    return hashlib.blake2b(key, digest_size=4, person=b"octavo.keyid.v1").digest()


def mac(key: bytes, body: bytes) -> bytes:
    """Keyed BLAKE2b is a MAC by itself, at a third of the cost of HMAC. One MAC is computed per event."""
    return hashlib.blake2b(body, digest_size=MAC_BYTES, key=key).digest()
