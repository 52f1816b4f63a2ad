"""Sees to it that named prefixes stay warm: says to workers what to keep, and has them compute what they lack.

Every router does this for all workers it has met, and all decide alike: which workers a prefix is for depends on their
names alone, so it changes little when workers come and go. A worker takes what all routers say together.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf

from octavo.net.security.api_keys import salt_of
from octavo.pooling.params import PoolingParams
from octavo.request import hashing
from octavo.request.errors import ServingError, Unimplemented
from octavo.request.ids import BlockHash, Incarnation
from octavo.request.named_prefix import NamedPrefix
from octavo.request.record import WorkerRole
from octavo.v1 import inference_pb2
from router.background_tasks import BackgroundTasks
from router.fleet.worker_link import LinkError, WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.named.named_prefixes import NamedPrefixes

log = logging.getLogger(__name__)

ROUND_S = 1.0
REPEAT_S = 5.0  # how often a worker is told again what it was told
IDLE_REPEAT_S = 20.0  # that nothing is to be kept: wishes of routers that are gone end at a call
MAX_PAUSE_S = 300.0  # between two times that a worker computes what it lacks
WARM = PoolingParams()  # the vector is not used: the blocks stay


@dataclass(slots=True)
class Warmth:
    """What one worker has said of the prefixes that are for it, by their keys."""

    told: tuple[str, ...] = ()
    told_at: float = -inf
    warm: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)  # of which it keeps a part only
    warming: bool = False
    pause_s: float = REPEAT_S  # twice as long after each time that the worker still lacked something
    warm_again_at: float = -inf


@dataclass(eq=False)
class PrefixKeeper:
    """Lives on the router's event loop."""

    prefixes: NamedPrefixes
    pool: WorkerPool
    background: BackgroundTasks
    _warmth: dict[Incarnation, Warmth] = field(default_factory=dict)
    _hashes: dict[tuple[str, str, str, int], list[BlockHash]] = field(default_factory=dict)

    async def keep(self) -> None:
        """One round, with the pause before the next."""
        await self.prefixes.refresh()
        links = [link for link in self.pool.links.values() if link.facts and link.view().stays]
        self._warmth = {link.incarnation: self._warmth.get(link.incarnation, Warmth()) for link in links}
        known = self.prefixes.all()
        by_worker: dict[Incarnation, list[NamedPrefix]] = {link.incarnation: [] for link in links}
        for prefix in known:
            for link in chosen(prefix, links):
                by_worker[link.incarnation].append(prefix)
        self._hashes = {
            key: hashes for key, hashes in self._hashes.items() if any(key[0] == each.key for each in known)
        }
        await asyncio.gather(*(self._tell(link, by_worker[link.incarnation]) for link in links))
        await asyncio.sleep(ROUND_S)

    def warm_on(self, prefix: NamedPrefix) -> list[str]:
        """The names of workers that have all of it, as they said last."""
        return self._names(prefix, lambda warmth: warmth.warm)

    def full_on(self, prefix: NamedPrefix) -> list[str]:
        return self._names(prefix, lambda warmth: warmth.full)

    def _names(self, prefix: NamedPrefix, which: Callable[[Warmth], set[str]]) -> list[str]:
        found = (incarnation for incarnation, warmth in self._warmth.items() if prefix.key in which(warmth))
        return sorted(self.pool.name_of(incarnation) for incarnation in found)

    async def _tell(self, link: WorkerLink, prefixes: Sequence[NamedPrefix]) -> None:
        warmth, now = self._warmth[link.incarnation], time.monotonic()
        keys = tuple(prefix.key for prefix in prefixes)
        if keys == warmth.told and now - warmth.told_at < (REPEAT_S if keys else IDLE_REPEAT_S):
            return
        hashes = [self._hashes_of(prefix, link) for prefix in prefixes]
        try:
            answer = await link.keep([each for of_one in hashes for each in of_one])
        except LinkError as error:
            log.debug("worker %s: Keep: %s", link.worker_id, error)
            return
        warmth.told, warmth.told_at, warmth.warm, warmth.full = keys, now, set(), set()
        missing, start = set(answer.missing), 0
        lacking: list[NamedPrefix] = []
        for prefix, of_one in zip(prefixes, hashes, strict=True):
            places = range(start, start + len(of_one))
            start = places.stop
            if places.stop > answer.num_kept:
                warmth.full.add(prefix.key)
            elif missing.isdisjoint(places):
                warmth.warm.add(prefix.key)
            else:
                lacking.append(prefix)
        if not lacking:
            warmth.pause_s = REPEAT_S
        elif not warmth.warming and now >= warmth.warm_again_at:
            warmth.pause_s = min(2 * warmth.pause_s, MAX_PAUSE_S)
            warmth.warming, warmth.warm_again_at = True, now + warmth.pause_s
            self.background.spawn(self._warm(link, lacking, warmth))

    async def _warm(self, link: WorkerLink, lacking: Sequence[NamedPrefix], warmth: Warmth) -> None:
        """Has the worker compute prefixes, one after the other, behind all that its clients wait for."""
        try:
            for prefix in lacking:
                if prefix.key not in warmth.told:  # it was removed meanwhile, or is for other workers now
                    continue
                bulk = int(inference_pb2.PRIORITY_BULK)
                vectors = link.pool([prefix.tokens], WARM, salt=salt_of(prefix.tenant), priority=bulk, deadline_in_ms=0)
                async with aclosing(vectors):
                    async for found in vectors:
                        if found[0].failure is not None:
                            log.warning("worker %s: prefix %s: %s", link.worker_id, prefix.name, found[0].failure)
        except Unimplemented as error:
            log.warning("worker %s computes no prefix ahead of requests: %s", link.worker_id, error)
        except ServingError as error:
            log.info("worker %s: prefix: %s", link.worker_id, error)
        finally:
            warmth.warming, warmth.told_at = False, -inf  # the next round asks what it has by now

    def _hashes_of(self, prefix: NamedPrefix, link: WorkerLink) -> list[BlockHash]:
        facts = link.facts
        if facts is None:
            return []
        key = (prefix.key, facts.layout, facts.numerics, hash(prefix.tokens))
        if key not in self._hashes:
            salt, numerics = salt_of(prefix.tenant), facts.numerics
            root = hashing.root_key(facts.fingerprint, facts.layout, salt=salt, numerics=numerics)
            self._hashes[key] = hashing.block_hashes(root, prefix.tokens, facts.block_size)
        return self._hashes[key]


def chosen(prefix: NamedPrefix, links: Sequence[WorkerLink]) -> list[WorkerLink]:
    """The workers that a prefix is for: of those of its model that compute prompts, as many as it says."""
    able = [link for link in links if link.facts and link.facts.fingerprint == prefix.model and not link.load.draining]
    able = [link for link in able if link.role is not WorkerRole.DECODE] or able
    able.sort(key=lambda link: hashlib.blake2b(f"{prefix.key}\n{link.worker_id}".encode()).digest())
    return able[: prefix.workers or None]
