"""Pictures come from the store, are checked against their digests, and are encoded once beside the steps."""

import threading

import pytest
from scheduler_parts import SchedulerParts

from gpu_worker.engine import picture_loader
from gpu_worker.engine.block_port import BlockPort
from gpu_worker.engine.picture_loader import PictureLoader
from gpu_worker.engine.picture_shelf import PictureShelf
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.pictures.picture import Picture, digest_pixels, pack_pictures
from octavo.pictures.support import PictureSupport
from octavo.request.errors import CannotMove, Loading, NotFound, OutOfBlocks, StoreUnavailable, TooLarge
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

SEQUENCE, SALT = SequenceId("a" * 32), "tenant"
SUPPORT = PictureSupport(refusal="", token_id=9, cell=2, min_pixels=4, max_pixels=400)


class Encoded:
    def __init__(self, picture):
        self.digest, self.num_bytes = picture.digest, 10


class Memory:
    def __init__(self):
        self.encoded: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def num_bytes_of(self, picture):
        return 10

    def encode(self, picture, pixels):
        assert self.gate.wait(30)
        self.encoded.append(picture.digest)
        return Encoded(picture)

    def add(self, encoded):
        pass

    def drop(self, digest):
        pass


class World:
    """A loader, its memory, and what the store has."""

    def __init__(self):
        self.memory, self.kept, self.away, self.used = Memory(), dict[str, bytes](), False, set[str]()
        self.parts = SchedulerParts(SchedulerConfig(), FakeRunner().info)
        shelf = PictureShelf(self.memory, 25, lambda: self.used)
        self.loader = PictureLoader(shelf, self.parts.port, self.read, SUPPORT)

    async def read(self, seq_id, digest):
        assert seq_id == SEQUENCE
        if self.away:
            raise StoreUnavailable("it is away")
        return self.kept.get(digest, b"")

    def picture(self, number, *, keep=True):
        pixels = bytes([number]) * 24
        made = Picture(digest_pixels(pixels, 2, 4, SALT), 0, 1, 2)
        if keep:
            self.kept[made.digest] = pixels
        return made

    async def bring(self, *pictures):
        await self.loader.bring(SEQUENCE, pictures, SALT)


@pytest.fixture
def world():
    made = World()
    engine = made.parts.engine(FakeRunner(), lambda _: None)
    engine.start()
    yield made
    made.memory.gate.set()
    engine.stop()


async def test_pictures_are_encoded_once(world):
    one, other = world.picture(1), world.picture(2)
    await world.bring(one, other, one)
    await world.bring(other)
    assert world.memory.encoded == [one.digest, other.digest]


async def test_what_the_store_lacks_or_has_changed_is_refused(world):
    lost, changed = world.picture(1, keep=False), world.picture(2)
    world.kept[changed.digest] = bytes(24)
    for picture, what in ((lost, "has no picture"), (changed, "has other bytes")):
        with pytest.raises(NotFound, match=what):
            await world.bring(picture)
    await world.loader.bring(SEQUENCE, [world.picture(3)], SALT)
    with pytest.raises(NotFound, match="has other bytes"):
        await world.loader.bring(SEQUENCE, [world.picture(4)], "another tenant")


async def test_a_store_that_is_away_is_asked_again_later(world):
    world.away = True
    with pytest.raises(Loading, match="retry"):
        await world.bring(world.picture(1))
    world.away = False
    await world.bring(world.picture(1))


async def test_who_waits_long_comes_back_later(world, monkeypatch):
    monkeypatch.setattr(picture_loader, "PATIENCE_S", 0.05)
    world.memory.gate.clear()
    one, other = world.picture(1), world.picture(2)
    with pytest.raises(Loading, match="being encoded"):
        await world.bring(one, other)
    world.memory.gate.set()
    monkeypatch.setattr(picture_loader, "PATIENCE_S", 20)
    await world.bring(one, other)
    assert world.memory.encoded == [one.digest, other.digest]


async def test_a_sequence_that_comes_brings_its_pictures(world):
    """Where there is no room now it may be tried again; CannotMove is for good."""
    port = BlockPort(world.parts.port, world.parts.workload, pictures=world.loader)
    pictures = [world.picture(number) for number in (1, 2)]

    def showing(*shown):
        placed = [Picture(each.digest, 2 * i, 1, 2) for i, each in enumerate(shown)]
        return Admission(
            seq_id=SEQUENCE,
            epoch=1,
            prompt=[9] * 8,
            sampling=SamplingParams(),
            salt=SALT,
            pictures=pack_pictures(placed),
        )

    await port.bring_pictures(showing(*pictures))
    world.used = {each.digest for each in pictures}
    with pytest.raises(OutOfBlocks):
        await port.bring_pictures(showing(world.picture(3)))
    world.used = set()
    with pytest.raises(CannotMove, match="has no picture"):
        await port.bring_pictures(showing(world.picture(4, keep=False)))
    with pytest.raises(CannotMove, match="picture-cache-bytes"):
        await port.bring_pictures(showing(*map(world.picture, (5, 6, 7))))
    with pytest.raises(TooLarge):
        await world.bring(*map(world.picture, (5, 6, 7)))
    with pytest.raises(CannotMove, match="no picture is encoded"):
        await BlockPort(world.parts.port, world.parts.workload).bring_pictures(showing(pictures[0]))
