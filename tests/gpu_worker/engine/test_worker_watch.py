"""Watchers: numbers without a gap, or a gap that shows; a snapshot and what follows it describe one cache."""

import asyncio
import itertools
import random
from itertools import pairwise

import pytest
from effort import patience
from hypothesis import given
from hypothesis import strategies as st
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.engine import worker_watch
from gpu_worker.engine.worker_watch import (
    CacheEvent,
    CacheEventBatch,
    CacheSnapshot,
    CacheWatchers,
    WorkerWatch,
    join_events,
)
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.ids import SequenceId
from octavo.request.sampling import SamplingParams


class Reader:
    """What a router makes of a Watch stream."""

    def __init__(self, snapshot: CacheSnapshot, batch: CacheEventBatch) -> None:
        device, host = ({data[start : start + 16] for start in range(0, len(data), 16)} for data in snapshot)
        assert not device & host
        self.hashes = device | host
        self.num_on_host = len(host)
        self.event_seq = batch.event_seq
        self.num_events = 0
        assert self.digest == batch.digest

    @property
    def digest(self) -> int:
        digest = 0
        for block_hash in self.hashes:
            digest ^= int.from_bytes(block_hash[:8], "little")
        return digest

    def apply(self, batch: CacheEventBatch) -> bool:
        """False if it has to start over. Whatever is applied must leave exactly the cache that is described."""
        if self.event_seq + len(batch.events) != batch.event_seq:
            return False
        for kind, data in batch.events:
            hashes = {data[start : start + 16] for start in range(0, len(data), 16)}
            if kind == "stored":  # also of a block that comes back from the host pool
                self.hashes |= hashes
            else:
                assert kind == "removed" and hashes <= self.hashes
                self.hashes -= hashes
        self.event_seq = batch.event_seq
        self.num_events += len(batch.events)
        assert self.digest == batch.digest
        return True


@given(st.lists(st.tuples(st.sampled_from(["stored", "removed"]), st.binary(min_size=1, max_size=1))))
def test_joining_keeps_order_and_content(events):
    whole = join_events(events)
    assert all(kind != following for (kind, _), (following, _) in pairwise(whole))
    flat = [(kind, bytes([byte])) for kind, data in whole for byte in data]
    assert flat == [(kind, data) for kind, data in events]


async def test_a_watcher_that_falls_too_far_behind_has_a_gap_and_holds_little(monkeypatch):
    monkeypatch.setattr(worker_watch, "MAX_PENDING_BYTES", 100)
    watchers = CacheWatchers()
    slow, quick = watchers.open_watcher(), watchers.open_watcher()
    reader = Reader(CacheSnapshot(b"", b""), CacheEventBatch(0, 0, []))
    digest = 0
    for number in range(1, 50):
        block_hash = number.to_bytes(16, "big")[::-1]
        digest ^= int.from_bytes(block_hash[:8], "little")
        watchers.publish_events([CacheEvent("stored", block_hash)], digest)
        assert sum(len(event.hashes) for event in slow.events) <= 100
        assert reader.apply(await quick.next_batch(0.01))
    assert not Reader(CacheSnapshot(b"", b""), CacheEventBatch(0, 0, [])).apply(await slow.next_batch(0.01))
    watchers.publish_events([CacheEvent("stored", b"x" * 16)], digest)  # and after that it is told again
    assert len((await slow.next_batch(0.01)).events) == 1


@given(
    changes=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 7), max_size=4, unique=True)), max_size=30),
    most=st.sampled_from([0, 48, 1 << 20]),
    reads=st.integers(1, 7),
)
async def test_what_is_told_of_files_is_what_was_published(changes, most, reads):
    """Also to one who reads so seldom that all of them are told again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_watch, "MAX_FILE_BYTES", most)
        watchers = CacheWatchers()
        watchers.publish_files([number.to_bytes(16, "big") for number in range(3)], [])
        watcher, present, told = watchers.open_watcher(), set(range(3)), set()

        def read(batch: CacheEventBatch) -> None:
            for kind, hashes in batch.file_events:
                numbers = {int.from_bytes(hashes[at : at + 16], "big") for at in range(0, len(hashes), 16)}
                if kind == "stored":
                    told.update(numbers)
                else:
                    told.difference_update(numbers if kind == "removed" else set(told))

        read(watcher.begin(CacheSnapshot(b"", b""), watchers.files))
        for number, (stored, numbers) in enumerate(changes):
            hashes = [each.to_bytes(16, "big") for each in numbers]
            watchers.publish_files(*((hashes, []) if stored else ([], hashes)))
            present = present | set(numbers) if stored else present - set(numbers)
            if number % reads == 0:
                read(await watcher.next_batch(0.0))
                assert told == present
        read(await watcher.next_batch(0.0))
        assert told == present


@pytest.mark.parametrize("seed", range(3))
async def test_every_message_describes_the_cache_while_steps_run(seed):
    """Watchers come and go while blocks are stored and evicted; no digest is ever wrong, no number is missing."""
    rng = random.Random(seed)
    runner = FakeRunner(block_size=4, num_blocks=24, num_host_blocks=8, context_tokens=64, step_s=0.0005)
    config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=8, max_waiting=10_000)
    parts = SchedulerParts(config, runner.info)
    numbers = itertools.count()

    def refill() -> None:
        """However fast this machine is, there is work while anyone watches."""
        while len(parts.workload.sequences) < 24:
            prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))]
            params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 12), seed=0)
            name = SequenceId(str(next(numbers)))
            parts.scheduler.admit(new_sequence(name, prompt, params))

    def between_steps() -> None:
        refill()
        watch.refresh()

    watch = WorkerWatch(parts.port, parts.scheduler, parts.workload, parts.times)
    engine = parts.engine(runner, lambda result: None, on_progress=[between_steps], idle_round_s=0.01)
    refill()
    engine.start()
    engine.control.grant_steps(0)
    num_events = num_on_host = 0

    async def keep_watching() -> None:
        nonlocal num_events, num_on_host
        await asyncio.sleep(rng.random() / 10)
        watcher = watch.watchers.open_watcher()
        first = await watch.begin_watch(watcher)
        assert not first.events
        reader = Reader(first.snapshot, first)
        num_on_host += reader.num_on_host
        for _ in range(rng.randrange(1, 40)):
            await asyncio.sleep(rng.choice([0, 0, 0.01]))
            assert reader.apply(await watcher.next_batch(0.01))
        num_events += reader.num_events
        watch.watchers.close_watcher(watcher)

    async with asyncio.timeout(patience(60)):
        await asyncio.gather(*(keep_watching() for _ in range(12)))
        while not num_on_host:  # the first blocks may be swapped out only now
            await keep_watching()
    engine.stop()
    assert num_events > 50
    await asyncio.sleep(0)
    assert not watch.watchers._watchers
