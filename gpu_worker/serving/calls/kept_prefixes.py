"""Which blocks routers want to stay in the prefix cache: those of the prefixes that operators have named."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from gpu_worker.blocks.prefix_cache import PrefixCache
from gpu_worker.engine.command_port import CommandPort
from octavo.request.errors import InvalidArgument
from octavo.request.ids import BlockHash

MAX_HASHES = 65_536
HASH_BYTES = 16
WANTED_S = 30.0  # how long after its last call a router's hashes count: another router may not have met this worker yet


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What became of the hashes of one call."""

    missing: list[int]  # indexes of those that are nowhere here
    num_kept: int  # from the first on


@dataclass(frozen=True, slots=True)
class Wish:
    """What one router wants to stay, in the order of importance."""

    hashes: tuple[BlockHash, ...]
    until: float


class KeptPrefixes:
    """The hashes that routers have asked for. At most half of the blocks stay for them: sequences need the others."""

    def __init__(self, port: CommandPort, cache: PrefixCache, num_blocks: int) -> None:
        self._port = port
        self._cache = cache
        self._most = num_blocks // 2
        self._wishes: dict[str, Wish] = {}  # by router

    async def keep(self, router_id: str, hashes: Sequence[bytes]) -> KeptAnswer:
        """Replaces what this router has asked for. Raises InvalidArgument."""
        if len(hashes) > MAX_HASHES:
            raise InvalidArgument("hashes", f"{len(hashes)} are too many; at most {MAX_HASHES}")
        if any(len(each) != HASH_BYTES for each in hashes):
            raise InvalidArgument("hashes", f"each has {HASH_BYTES} bytes")
        now, asked = time.monotonic(), tuple(map(BlockHash, hashes))
        self._wishes[router_id] = Wish(asked, now + WANTED_S)
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}
        others = (each for name, wish in self._wishes.items() if name != router_id for each in wish.hashes)
        kept = list(dict.fromkeys((*asked, *others)))[: self._most]
        if not self._cache.enabled:
            return KeptAnswer([], 0)
        missing = await asyncio.wrap_future(self._port.post_block(lambda _: self._keep(kept, asked)))
        known = set(kept)
        return KeptAnswer(missing, sum(1 for _ in takewhile(known.__contains__, asked)))

    def _keep(self, kept: Sequence[BlockHash], asked: Sequence[BlockHash]) -> list[int]:
        """A block command."""
        self._cache.keep(kept)
        return [
            index
            for index, block_hash in enumerate(asked)
            if self._cache.find(block_hash) is None and block_hash not in self._cache.on_host
        ]
