"""Encoded pictures stay while sequences show them; others go, the one that was used longest ago first."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.picture_shelf import PictureShelf
from octavo.pictures.picture import Picture
from octavo.request.errors import OutOfBlocks, TooLarge, Unimplemented


@dataclass(frozen=True)
class Encoded:
    digest: str
    num_bytes: int


@dataclass
class Memory:
    there: set[str] = field(default_factory=set)

    def num_bytes_of(self, picture):
        return picture.rows

    def encode(self, picture, pixels):
        return Encoded(picture.digest, picture.rows)

    def add(self, encoded):
        self.there.add(encoded.digest)

    def drop(self, digest):
        self.there.remove(digest)


def picture(number, size=2):
    return Picture(f"{number:032x}", 0, size, 1)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_what_is_in_use_stays_and_the_bound_holds(steps):
    memory, used = Memory(), set[str]()
    shelf = PictureShelf(memory, 7, lambda: used)
    for number, keeps in steps:
        each = picture(number, 1 + number % 3)
        before = set(used)
        try:
            shelf.require_room(each)
            shelf.put(memory.encode(each, b""))
        except OutOfBlocks:
            assert sum(1 + int(digest, 16) % 3 for digest in used) + each.rows > 7 and each.digest not in used
        else:
            assert shelf.has_all([each])
        assert before <= memory.there and shelf.num_bytes == sum(1 + int(d, 16) % 3 for d in memory.there) <= 7
        if keeps and each.digest in memory.there:
            used.add(each.digest)
        elif not keeps:
            used.discard(each.digest)


def test_the_one_used_longest_ago_goes():
    memory = Memory()
    shelf = PictureShelf(memory, 4, set)
    for number in (1, 2):
        shelf.put(Encoded(picture(number).digest, 2))
    assert shelf.has_all([picture(1)])
    shelf.put(Encoded(picture(3).digest, 2))
    assert memory.there == {picture(1).digest, picture(3).digest}
    assert shelf.lacking([picture(2), picture(1), picture(2)]) == [picture(2)]


def test_what_never_fits_is_refused():
    shelf = PictureShelf(Memory(), 4, set)
    shelf.check_size([picture(1), picture(1), picture(2)])
    with pytest.raises(TooLarge, match="picture-cache-bytes"):
        shelf.check_size([picture(1), picture(2), picture(3)])
    with pytest.raises(Unimplemented, match="picture-cache-bytes"):
        PictureShelf(Memory(), 0, set).check_size([picture(1)])
