"""Which prefix blocks each worker has cached, as far as the workers' events tell.

One dictionary from block hash to a bit mask of workers answers a lookup for all workers at once: the workers that
still have the whole prefix are the `and` of the masks so far, and each worker leaves that set once. A second
dictionary, nearly always much smaller, holds the blocks in host pools, and a third one those that workers find in
files. Sets of blocks per worker make it cheap to forget a worker.

A wrong entry costs a prefill and never a wrong token, because the worker matches the prompt with its own cache again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate, compress, count, islice, repeat
from operator import and_, invert, ne, or_
from typing import NamedTuple

from octavo.request.ids import BlockHash, Incarnation

HASH_BYTES = 16


class HitCounts(NamedTuple):
    """How much of a prefix a worker has, each part where it comes from most quickly."""

    device: int
    host: int = 0  # in its host pool
    files: int = 0  # in files that it can read


_hit_counts = tuple.__new__  # in half the time of the constructor, which hundreds of workers would wait for


class KvChange(Enum):
    """The kinds of octavo.internal.v1.KvEvent. Of files there are STORED, REMOVED and CLEARED."""

    STORED = auto()  # on the device
    DEMOTED = auto()  # not on the device any more, but in the host pool
    REMOVED = auto()  # from device and host pool
    CLEARED = auto()  # all of it


class KvEvent(NamedTuple):
    """One change of a worker's prefix cache; `hashes` is 16 bytes per block, one after another."""

    change: KvChange
    hashes: bytes = b""


@dataclass(slots=True)
class _WorkerEntry:
    """The prefix cache of one worker, as its Watch stream describes it."""

    bit: int
    event_seq: int
    digest: int = 0  # XOR of the hashes (first 8 bytes, little endian) in either set, each once
    device: set[bytes] = field(default_factory=set)
    host: set[bytes] = field(default_factory=set)
    files: set[bytes] = field(default_factory=set)


class KvIndex:
    """The prefix caches of all workers, by incarnation."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, _WorkerEntry] = {}
        self._names: list[Incarnation] = []  # _names[n] is the worker that has bit n; stale if the bit is free
        self._device: dict[bytes, int] = {}
        self._host: dict[bytes, int] = {}
        self._files: dict[bytes, int] = {}

    def apply_snapshot(
        self, incarnation: Incarnation, device_hashes: bytes, host_hashes: bytes, event_seq: int
    ) -> None:
        """Replaces all that is known of a worker. `event_seq` is the number of the last event in the snapshot."""
        self.forget_worker(incarnation)
        worker = self._workers[incarnation] = _WorkerEntry(self._free_bit(incarnation), event_seq)
        for block in _split(host_hashes):
            self._add(worker, block, worker.host, self._host)
        self._store(worker, device_hashes)

    def apply_events(self, incarnation: Incarnation, events: Sequence[KvEvent], event_seq: int, digest: int) -> bool:
        """Applies events in order; `event_seq` numbers the last of them, `digest` describes the cache after it.

        False where the worker has no snapshot, the numbers have a gap or the digest is another: then the worker has no
        entries any more, and its events are ignored until its next snapshot.
        """
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        if worker.event_seq + len(events) == event_seq:
            for event in events:
                self._apply_one(worker, event)
            worker.event_seq = event_seq
            if worker.digest == digest:
                return True
        self.forget_worker(incarnation)
        return False

    def apply_file_events(self, incarnation: Incarnation, events: Sequence[KvEvent]) -> None:
        """Applies changes of a worker's files, in order. Those of a worker without a snapshot are ignored."""
        if (worker := self._workers.get(incarnation)) is None:
            return
        for event in events:
            if event.change is KvChange.CLEARED:
                _forget(worker.files, self._files, worker.bit)
            for block in _split(event.hashes):
                if event.change is KvChange.STORED:
                    self._set(worker, block, worker.files, self._files)
                elif block in worker.files:  # removed
                    worker.files.remove(block)
                    _unset(self._files, block, worker.bit)

    @property
    def num_blocks(self) -> dict[str, int]:
        """How many different blocks the workers have on their devices, in their host pools, and in files."""
        return {"device": len(self._device), "host": len(self._host), "files": len(self._files)}

    def forget_worker(self, incarnation: Incarnation) -> None:
        """Removes all entries of a worker. An unknown worker changes nothing."""
        worker = self._workers.pop(incarnation, None)
        if worker is not None:
            self._clear(worker)
            _forget(worker.files, self._files, worker.bit)

    def find_hits(self, hashes: Sequence[BlockHash], block_size: int = 1) -> dict[Incarnation, HitCounts]:
        """How long a prefix each worker has cached. A worker that has not even the first block is left out.

        The prefix is counted in tokens if `block_size` is given, otherwise in blocks.
        """
        on_device = list(map(self._device.get, hashes, repeat(0)))
        in_host = list(map(self._host.get, hashes, repeat(0))) if self._host else []
        in_files = list(map(self._files.get, hashes, repeat(0))) if self._files else []
        if not (any(in_host) or any(in_files)):
            return self._runs(list(accumulate(on_device, and_)), block_size)
        in_memory = list(map(or_, on_device, in_host)) if in_host else on_device
        alive = list(accumulate(map(or_, in_memory, in_files) if in_files else in_memory, and_))
        runs = self._runs(alive, block_size)
        num_host = self._lengths_without(alive, on_device, in_memory, block_size) if in_host else {}
        num_files = self._lengths_without(alive, in_memory, alive, block_size) if in_files else {}
        for name in {**num_host, **num_files}:
            host, files = num_host.get(name, 0), num_files.get(name, 0)
            runs[name] = _hit_counts(HitCounts, (runs[name].device - host - files, host, files))
        return runs

    def _lengths_without(
        self, alive: list[int], without: list[int], within: list[int], unit: int
    ) -> dict[Incarnation, int]:
        """How many masks of `alive` each worker is in that is in `within`, but not in `without`, times `unit`."""
        only = map(and_, alive, map(and_, within, map(invert, without)))
        return {name: length * unit for name, length in self._lengths(list(only)).items()}

    def _runs(self, alive: list[int], unit: int) -> dict[Incarnation, HitCounts]:
        """The position at which each worker leaves the masks, times `unit`.

        `alive[i]` holds the workers that have all of the blocks 0 to i, so a worker that has left never comes back.
        The comparison of the masks runs in C. Python sees only the positions at which workers leave.
        """
        alive.append(0)
        names = self._names
        found: dict[Incarnation, HitCounts] = {}
        for position in compress(count(1), map(ne, alive, islice(alive, 1, None))):
            left = alive[position - 1] ^ alive[position]
            hit = _hit_counts(HitCounts, (position * unit, 0, 0))
            if left & (left - 1):
                for name in self._named(left):
                    found[name] = hit
            else:
                found[names[left.bit_length() - 1]] = hit
        return found

    def _lengths(self, masks: list[int]) -> dict[Incarnation, int]:
        """How many masks each worker is in: the sum of the ends of its runs, less the sum of their beginnings."""
        lengths: dict[Incarnation, int] = {}
        masks = [0, *masks, 0]
        for position in compress(count(), map(ne, masks, islice(masks, 1, None))):
            before, after = masks[position], masks[position + 1]
            for name in self._named(after & ~before):
                lengths[name] = lengths.get(name, 0) - position
            for name in self._named(before & ~after):
                lengths[name] += position
        return lengths

    def _named(self, mask: int) -> Iterable[Incarnation]:
        """The workers whose bits are set."""
        if mask & (mask - 1) == 0:
            return (self._names[mask.bit_length() - 1],) if mask else ()
        return compress(self._names, map(int, bin(mask)[:1:-1]))

    def _free_bit(self, incarnation: Incarnation) -> int:
        """The lowest bit that no worker has. From now on it stands for this worker."""
        taken = {worker.bit for worker in self._workers.values()}
        number = next(number for number in count() if 1 << number not in taken)
        self._names[number : number + 1] = [incarnation]
        return 1 << number

    def _apply_one(self, worker: _WorkerEntry, event: KvEvent) -> None:
        if event.change is KvChange.STORED:
            self._store(worker, event.hashes)
        elif event.change is KvChange.DEMOTED:
            for block in _split(event.hashes):
                self._add(worker, block, worker.host, self._host)
                if block in worker.device:
                    worker.device.remove(block)
                    _unset(self._device, block, worker.bit)
        elif event.change is KvChange.REMOVED:
            for block in _split(event.hashes):
                self._remove(worker, block)
        else:
            self._clear(worker)

    def _store(self, worker: _WorkerEntry, hashes: bytes) -> None:
        for block in _split(hashes):
            self._add(worker, block, worker.device, self._device)

    def _add(self, worker: _WorkerEntry, block: bytes, owned: set[bytes], masks: dict[bytes, int]) -> None:
        if block in owned:
            return
        if block not in worker.device and block not in worker.host:
            worker.digest ^= _short(block)
        self._set(worker, block, owned, masks)

    def _set(self, worker: _WorkerEntry, block: bytes, owned: set[bytes], masks: dict[bytes, int]) -> None:
        owned.add(block)
        mask = masks.get(block)
        masks[block] = worker.bit if mask is None else mask | worker.bit  # most masks are one shared integer

    def _remove(self, worker: _WorkerEntry, block: bytes) -> None:
        """The worker has the block neither on the device nor in the host pool any more."""
        if block in worker.device or block in worker.host:
            worker.digest ^= _short(block)
        for owned, masks in ((worker.device, self._device), (worker.host, self._host)):
            if block in owned:
                owned.remove(block)
                _unset(masks, block, worker.bit)

    def _clear(self, worker: _WorkerEntry) -> None:
        for owned, masks in ((worker.device, self._device), (worker.host, self._host)):
            _forget(owned, masks, worker.bit)
        worker.digest = 0


def _forget(owned: set[bytes], masks: dict[bytes, int], bit: int) -> None:
    for block in owned:
        _unset(masks, block, bit)
    owned.clear()


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
