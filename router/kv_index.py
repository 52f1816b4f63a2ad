"""Which worker can be hit by which prefix blocks, as far as the workers' events tell.

One dictionary from block hash to a bit mask of workers answers a lookup for all workers at once: the workers that still
have the whole prefix are an `and` of masks, and each worker leaves that set once. A second dictionary, nearly always much
smaller, does the same for host pools. A set per worker makes forgetting it cheap and checks its digest.

A wrong entry costs a prefill, never a wrong token: the worker matches its own cache again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from octavo.ids import BlockHash, Incarnation

HASH_BYTES = 16


class KvChange(Enum):
    """The kinds of octavo.v1.KvEvent."""

    STORED = auto()
    REMOVED = auto()
    CLEARED = auto()


class KvEvent(NamedTuple):
    """One change of a worker's prefix cache; `hashes` is 16 bytes per block, one after another."""

    change: KvChange
    hashes: bytes = b""


class Applied(Enum):
    """What became of a batch of events."""

    OK = auto()
    NEEDS_SNAPSHOT = auto()  # the worker has no entries now, and takes no events before its next snapshot


@dataclass(slots=True)
class _Worker:
    bit: int
    incarnation: Incarnation
    event_seq: int
    digest: int = 0  # XOR of the hashes (first 8 bytes, little endian) in either set, each once
    device: set[bytes] = field(default_factory=set)
    host: set[bytes] = field(default_factory=set)


class KvIndex:
    """The prefix caches of all workers, by incarnation."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Worker] = {}
        self._by_bit: dict[int, _Worker] = {}
        self._all_bits = 0
        self._device: dict[bytes, int] = {}
        self._host: dict[bytes, int] = {}

    def __contains__(self, incarnation: Incarnation) -> bool:
        return incarnation in self._workers

    @property
    def num_blocks(self) -> int:
        """Different blocks known, on any device or in any host pool."""
        return len(self._device.keys() | self._host.keys()) if self._host else len(self._device)

    def apply_snapshot(
        self, incarnation: Incarnation, device_hashes: bytes, host_hashes: bytes, event_seq: int
    ) -> None:
        """Replaces all that is known of a worker. `event_seq` is the number of the last event in the snapshot."""
        self.drop(incarnation)
        bit = self._free_bit()
        worker = _Worker(bit, incarnation, event_seq)
        self._workers[incarnation] = self._by_bit[bit] = worker
        self._all_bits |= bit
        for block in _split(host_hashes):
            self._add(worker, block, worker.host, self._host)
        self._store(worker, device_hashes)

    def apply(self, incarnation: Incarnation, events: Sequence[KvEvent], event_seq: int, digest: int) -> Applied:
        """Applies events in order; `event_seq` numbers the last of them, `digest` describes the cache after it.

        A worker without a snapshot, a gap in the numbers or another digest ends in NEEDS_SNAPSHOT.
        """
        worker = self._workers.get(incarnation)
        if worker is None:
            return Applied.NEEDS_SNAPSHOT
        if worker.event_seq + len(events) == event_seq:
            for event in events:
                self._apply_one(worker, event)
            worker.event_seq = event_seq
            if worker.digest == digest:
                return Applied.OK
        self.drop(incarnation)
        return Applied.NEEDS_SNAPSHOT

    def drop(self, incarnation: Incarnation) -> None:
        """Forgets a worker; unknown is fine."""
        worker = self._workers.pop(incarnation, None)
        if worker is not None:
            self._clear(worker)
            del self._by_bit[worker.bit]
            self._all_bits ^= worker.bit

    def hits(self, hashes: Sequence[BlockHash]) -> dict[Incarnation, tuple[int, int]]:
        """For each worker that has the first block: how many blocks of its longest leading run are on the device, and how
        many in the host pool alone."""
        found: dict[Incarnation, tuple[int, int]] = {}
        host_blocks: dict[int, int] = {}  # by bit; a worker whose run is in the host pool now counts from -start
        device, host = self._device.get, self._host.get
        alive, host_only = self._all_bits, 0
        for position, block in enumerate(hashes):
            on_device = alive & device(block, 0)
            if on_device == alive and not host_only:
                continue
            in_host = alive & ~on_device & host(block, 0)
            left = alive ^ on_device ^ in_host
            if in_host == host_only and not left:
                continue
            for bit in _bits(host_only & ~in_host):
                host_blocks[bit] += position
            for bit in _bits(in_host & ~host_only):
                host_blocks[bit] = host_blocks.get(bit, 0) - position
            for bit in _bits(left) if position else ():
                num_host = host_blocks.get(bit, 0)
                found[self._by_bit[bit].incarnation] = (position - num_host, num_host)
            alive, host_only = on_device | in_host, in_host
            if not alive:
                return found
        for bit in _bits(alive) if hashes else ():
            num_host = host_blocks.get(bit, 0) + (len(hashes) if bit & host_only else 0)
            found[self._by_bit[bit].incarnation] = (len(hashes) - num_host, num_host)
        return found

    def _free_bit(self) -> int:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        return bit

    def _apply_one(self, worker: _Worker, event: KvEvent) -> None:
        if event.change is KvChange.STORED:
            self._store(worker, event.hashes)
        elif event.change is KvChange.REMOVED:
            for block in _split(event.hashes):
                self._remove(worker, block)
        else:
            self._clear(worker)

    def _store(self, worker: _Worker, hashes: bytes) -> None:
        for block in _split(hashes):
            self._add(worker, block, worker.device, self._device)

    def _add(self, worker: _Worker, block: bytes, owned: set[bytes], masks: dict[bytes, int]) -> None:
        if block in owned:
            return
        if block not in worker.device and block not in worker.host:
            worker.digest ^= _short(block)
        owned.add(block)
        mask = masks.get(block)
        masks[block] = worker.bit if mask is None else mask | worker.bit  # most masks are one shared integer

    def _remove(self, worker: _Worker, block: bytes) -> None:
        """The block cannot be hit on this worker any more, wherever it was."""
        if block in worker.device or block in worker.host:
            worker.digest ^= _short(block)
        for owned, masks in ((worker.device, self._device), (worker.host, self._host)):
            if block in owned:
                owned.remove(block)
                _unset(masks, block, worker.bit)

    def _clear(self, worker: _Worker) -> None:
        for owned, masks in ((worker.device, self._device), (worker.host, self._host)):
            for block in owned:
                _unset(masks, block, worker.bit)
            owned.clear()
        worker.digest = 0


def digest_of(hashes: Iterable[bytes]) -> int:
    """The digest a worker with these different blocks reports."""
    digest = 0
    for block in hashes:
        digest ^= _short(block)
    return digest


def _unset(masks: dict[bytes, int], block: bytes, bit: int) -> None:
    rest = masks[block] ^ bit
    if rest:
        masks[block] = rest
    else:
        del masks[block]


def _short(block: bytes) -> int:
    return int.from_bytes(block[:8], "little")


def _split(hashes: bytes) -> Iterator[bytes]:
    return (hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
