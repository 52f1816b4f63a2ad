"""Which adapters are in memory: within the bound, never without those in use, and read beside the steps, once each."""

import asyncio
import random
import threading
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_parts import SchedulerParts

from gpu_worker.engine import adapter_loader, adapter_shelf
from gpu_worker.engine.adapter_loader import AdapterLoader
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.block_port import BlockPort
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import BadModel, CannotMove, Loading, NotFound, OutOfBlocks, TooLarge, Unimplemented
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams


@dataclass(frozen=True)
class Read:
    digest: str
    num_bytes: int


class Memory:
    """Its adapters are named by their sizes; `gate` lets reads end."""

    def __init__(self):
        self.there, self.reads, self.dropped, self.last = {}, [], [], 0
        self.gate = threading.Event()
        self.gate.set()

    def read(self, source, digest, max_bytes):
        self.reads.append(source)
        assert max_bytes == 200  # twice the bound: numbers may be kept in half as many bytes
        assert self.gate.wait(20)
        if source == "huge":
            raise MemoryError("no room")
        if source == "nowhere":
            raise NotFound("there is nothing")
        return Read(digest or source, int(source))

    def add(self, adapter):
        self.last += 1
        self.there[self.last] = adapter
        return self.last

    def drop(self, number):
        self.dropped.append(self.there.pop(number).digest)


CALLS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 60), st.sets(st.integers(1, 12))), max_size=25)


@given(CALLS)
def test_the_bound_is_kept_and_what_is_in_use_stays(calls):
    memory, used = Memory(), set()
    shelf = AdapterShelf(memory, 100, lambda: used)
    order = []  # of use, the latest last
    for digest, size, wanted in calls:
        used = wanted & memory.there.keys()
        before, memory.dropped = dict(memory.there), []
        try:
            number = shelf.put(Read(digest, size))
        except OutOfBlocks:
            assert memory.there == before
            assert sum(before[each].num_bytes for each in used) + size > 100
            continue
        assert memory.there[number].digest == digest
        assert shelf.find(digest) == number
        assert used <= memory.there.keys()
        order = [each for each in order if each != digest] + [digest]
        idle = [each.digest for number, each in before.items() if number not in used and each.digest != digest]
        gone = [each for each in order if each in idle][: len(memory.dropped)]
        assert memory.dropped == gone  # the one that was used longest ago goes first
        assert sum(each.num_bytes for each in memory.there.values()) == shelf.num_bytes <= 100
        assert set(shelf.digests) == {each.digest for each in memory.there.values()}


@settings(max_examples=20)
@given(
    st.integers(1, 3),
    st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4),
    st.integers(0, 1 << 30),
)
def test_adapters_that_fill_the_memory_take_turns(room, lengths, seed):
    """Four adapters are always asked for, twice a second, by sequences of such lengths; memory has room for some."""
    chance, asks = random.Random(seed), cycle("abcd")
    clock, running = [0.0], []  # of each sequence its adapter's number and its end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_shelf, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        shelf = AdapterShelf(Memory(), 10 * room, lambda: {number for number, _ in running})
        began = {digest: [0.0] for digest in "abcd"}
        while clock[0] < 60:
            running = [each for each in running if each[1] > clock[0]]
            digest = next(asks)
            try:
                shelf.require_turn(digest)
                running.append((shelf.put(Read(digest, 10)), clock[0] + lengths["abcd".index(digest)]))
                began[digest].append(clock[0])
            except OutOfBlocks:
                pass
            clock[0] += chance.uniform(0.1, 0.15)
    waits = [later - earlier for times in began.values() for earlier, later in pairwise([*times, clock[0]])]
    assert max(waits) < 4 * (adapter_shelf.TURN_S + max(lengths) + 1)  # of three others, and until it is asked again


def test_while_another_adapter_waits_the_sequences_of_one_go_on_for_a_turn(monkeypatch):
    """Of `a` sequences run until 4 s, and `b` waits from the first second on."""
    clock = [0.0]
    monkeypatch.setattr(adapter_shelf, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    shelf = AdapterShelf(Memory(), 10, lambda: {2} if shelf.digests == ("b",) else {1} if clock[0] < 4 else set())
    shelf.put(Read("a", 10))

    def asks(digest, at):
        clock[0] = at
        try:
            shelf.require_turn(digest)
            shelf.put(Read(digest, 10))
        except OutOfBlocks:
            return False
        return True

    said = [(asks("b", tenth / 10) if tenth > 9 else False, asks("a", tenth / 10)) for tenth in range(60)]
    assert [tenth for tenth, (_, a) in enumerate(said) if a and tenth != 30] == list(range(30))  # b waits for 2 s then
    assert [tenth for tenth, (b, _) in enumerate(said) if b] == list(range(40, 60))  # a has ended; b has its turn


def test_what_never_fits_is_refused_when_it_is_read():
    shelf = AdapterShelf(Memory(), 100, set)
    with pytest.raises(TooLarge, match="101 bytes does not fit 100"):
        shelf.read("101")
    with pytest.raises(Unimplemented, match="--adapter-bytes"):
        AdapterShelf(Memory(), 0, set).read("1")
    with pytest.raises(Unimplemented, match="takes no adapters"):
        AdapterShelf(None, 100, set).read("1")
    assert shelf.find("") == shelf.find("x") == 0


@pytest.fixture
def world():
    runner = FakeRunner()
    parts = SchedulerParts(SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8), runner.info)
    engine = parts.engine(runner, lambda _: None)
    engine.start()
    memory = Memory()
    yield memory, AdapterLoader(AdapterShelf(memory, 100, parts.workload.adapters_in_use), parts.port)
    memory.gate.set()
    engine.stop()


async def test_one_is_read_once_however_many_ask(world):
    memory, loader = world
    await asyncio.gather(*(loader.bring(digest, "40") for digest in ("a", "b", "a", "b", "a")))
    await loader.bring("a", "40")
    await loader.bring("", "")
    assert memory.reads == ["40", "40"]
    assert loader.shelf.digests == ("a", "b")


async def test_errors_are_told_and_not_kept(world):
    memory, loader = world
    for _ in range(2):
        with pytest.raises(NotFound):
            await loader.bring("a", "nowhere")
    assert memory.reads == ["nowhere"] * 2
    with pytest.raises(BadModel, match="huge: cannot be brought into memory: MemoryError"):
        await loader.bring("a", "huge")
    await loader.bring("a", "10")
    assert loader.shelf.find("a")


async def test_who_waits_long_comes_back_later(world, monkeypatch):
    memory, loader = world
    monkeypatch.setattr(adapter_loader, "PATIENCE_S", 0.05)
    memory.gate.clear()
    with pytest.raises(Loading, match="adapter a is being read"):
        await loader.bring("a", "10")
    memory.gate.set()
    monkeypatch.setattr(adapter_loader, "PATIENCE_S", 20)
    await loader.bring("a", "10")
    assert memory.reads == ["10"]


async def test_one_that_found_no_room_is_read_again_when_there_is_some(world):
    memory, loader = world
    used = {1}
    loader.shelf = AdapterShelf(memory, 100, lambda: used)
    await loader.bring("a", "60")
    for _ in range(5):
        with pytest.raises(OutOfBlocks, match="60 of 100 bytes for adapters are in use, and this one wants 50"):
            await loader.bring("b", "50")
    assert memory.reads == ["60", "50"]
    used.clear()
    await loader.bring("b", "50")
    assert memory.reads == ["60", "50", "50"]


def test_the_sizes_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(adapter_shelf, "MAX_SIZES", 3)
    shelf = AdapterShelf(Memory(), 100, lambda: {1})
    shelf.put(Read("here", 90))
    for digest in "abc":
        with pytest.raises(OutOfBlocks):
            shelf.put(Read(digest, 20))
    shelf.require_room("unknown")
    for digest in "abc":
        with pytest.raises(OutOfBlocks):
            shelf.require_room(digest)
    with pytest.raises(OutOfBlocks):
        shelf.put(Read("d", 20))
    shelf.require_room("a")  # forgotten


async def test_a_sequence_that_comes_may_be_tried_again_while_its_adapter_has_no_room(world, monkeypatch):
    """CannotMove is for good: who drains would not ask again."""
    memory, loader = world
    runner = FakeRunner()
    port = BlockPort(loader._port, SchedulerParts(SchedulerConfig(), runner.info).workload, loader)
    loader.shelf = AdapterShelf(memory, 100, lambda: {1})
    admission = Admission(
        seq_id=SequenceId("a" * 32), epoch=1, prompt=[1], sampling=SamplingParams(), lora="a", lora_source="60"
    )
    await port.bring_adapter(admission)
    with pytest.raises(OutOfBlocks):
        await port.bring_adapter(replace(admission, lora="b"))
    with pytest.raises(CannotMove, match="its adapter cannot be here: there is nothing"):
        await port.bring_adapter(replace(admission, lora="c", lora_source="nowhere"))
    monkeypatch.setattr(adapter_loader, "PATIENCE_S", 0.05)
    memory.gate.clear()
    with pytest.raises(Loading):
        await port.bring_adapter(replace(admission, lora="d", lora_source="10"))
    memory.gate.set()
