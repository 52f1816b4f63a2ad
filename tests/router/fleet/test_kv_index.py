from functools import reduce
from itertools import takewhile
from operator import xor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.request.ids import BlockHash, Incarnation
from router.fleet.kv_index import HitCounts, KvChange, KvEvent, KvIndex

BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(6)]
WORKERS = [Incarnation(name) for name in ("a", "b", "c")]
SOME_BLOCKS = st.lists(st.sampled_from(BLOCKS), max_size=5)
A_WORKER = st.sampled_from(WORKERS)


class WorkerTwin:
    """The slow, obvious twin: sets of blocks and an event number per worker."""

    def __init__(self, device, host, event_seq):
        self.device, self.host, self.files, self.event_seq = device, host, set(), event_seq

    def apply(self, event):
        blocks = {event.hashes[start : start + 16] for start in range(0, len(event.hashes), 16)}
        if event.change is KvChange.CLEARED:
            blocks = self.device | self.host
        self.device = self.device | blocks if event.change is KvChange.STORED else self.device - blocks
        if event.change is not KvChange.STORED:
            self.host = self.host | blocks if event.change is KvChange.DEMOTED else self.host - blocks
        self.event_seq += 1

    def digest(self):
        return reduce(xor, (int.from_bytes(block[:8], "little") for block in self.device | self.host), 0)

    def apply_to_files(self, event):
        blocks = {event.hashes[start : start + 16] for start in range(0, len(event.hashes), 16)}
        gone = self.files if event.change is KvChange.CLEARED else blocks
        self.files = self.files | blocks if event.change is KvChange.STORED else self.files - gone

    def hits(self, hashes):
        tiers = (self.device, self.host, self.files)
        found = [next((i for i, tier in enumerate(tiers) if block in tier), None) for block in hashes]
        hit = [*takewhile(lambda tier: tier is not None, found)]
        return HitCounts(*map(hit.count, range(3)))


def an_event():
    changes = [KvChange.DEMOTED, KvChange.STORED, KvChange.REMOVED, KvChange.CLEARED]
    return st.builds(KvEvent, st.sampled_from(changes), SOME_BLOCKS.map(b"".join)).map(
        lambda event: KvEvent(KvChange.CLEARED) if event.change is KvChange.CLEARED else event
    )


class KvIndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = KvIndex()
        self.twins: dict[Incarnation, WorkerTwin] = {}

    @initialize(device=SOME_BLOCKS)
    def begin(self, device):
        """All workers are known: there is nothing to see of others."""
        for worker in WORKERS:
            self.snapshot(worker, device, BLOCKS[:2], 0)

    @rule(worker=A_WORKER, device=SOME_BLOCKS, host=SOME_BLOCKS, event_seq=st.integers(0, 9))
    def snapshot(self, worker, device, host, event_seq):
        self.twins[worker] = WorkerTwin(set(device), set(host), event_seq)
        self.index.apply_snapshot(worker, b"".join(device), b"".join(host), event_seq)

    @rule(worker=A_WORKER, events=st.lists(an_event(), min_size=4, max_size=9))
    def continue_in_order(self, worker, events):
        twin = self.twins.get(worker)
        if twin is None:
            assert not self.index.apply_events(worker, events, 0, 0)
            return
        for event in events:
            twin.apply(event)
        assert self.index.apply_events(worker, events, twin.event_seq, twin.digest())

    @rule(worker=A_WORKER, events=st.lists(an_event(), max_size=3), gap=st.sampled_from([-2, -1, 1, 5]))
    def leave_a_gap(self, worker, events, gap):
        twin = self.twins.pop(worker, None)
        if twin is not None:
            event_seq = twin.event_seq + len(events) + gap
            assert not self.index.apply_events(worker, events, event_seq, twin.digest())

    @rule(worker=A_WORKER)
    def differ_in_digest(self, worker):
        twin = self.twins.pop(worker, None)
        if twin is not None:
            assert not self.index.apply_events(worker, [], twin.event_seq, twin.digest() ^ 1)

    @rule(worker=A_WORKER, events=st.lists(an_event(), min_size=4, max_size=9))
    def change_files(self, worker, events):
        events = [event for event in events if event.change is not KvChange.DEMOTED]
        for event in events if worker in self.twins else ():
            self.twins[worker].apply_to_files(event)
        self.index.apply_file_events(worker, events)

    @rule(worker=A_WORKER)
    def drop(self, worker):
        self.twins.pop(worker, None)
        self.index.forget_worker(worker)

    @rule(hashes=st.lists(st.sampled_from(BLOCKS), max_size=8))
    def look_up(self, hashes):
        expected = {worker: twin.hits(hashes) for worker, twin in self.twins.items()}
        assert self.index.find_hits(hashes) == {worker: hits for worker, hits in expected.items() if sum(hits)}

    @invariant()
    def nothing_is_left_behind(self):
        known = set().union(*(twin.device | twin.host for twin in self.twins.values()))
        assert self.index._device.keys() | self.index._host.keys() == known
        assert self.index._files.keys() == set().union(*(twin.files for twin in self.twins.values()))
        assert set(self.index._workers) == set(self.twins)


TestKvIndex = KvIndexMachine.TestCase
TestKvIndex.settings = settings(stateful_step_count=25)
