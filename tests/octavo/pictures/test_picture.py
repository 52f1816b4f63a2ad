"""Places of pictures: their packed form, and what they add to the hashes of blocks."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.pictures.picture import Picture, digest_pixels, pack_pictures, parse_pictures, shown
from octavo.pictures.support import PictureSupport
from octavo.request.errors import InvalidArgument
from octavo.request.hashing import block_hashes

SUPPORT = PictureSupport(refusal="", token_id=9, cell=28, min_pixels=56 * 56, max_pixels=28 * 28 * 64)
DIGESTS = st.binary(min_size=16, max_size=16).map(bytes.hex)


@st.composite
def placed(draw):
    """A prompt of few tokens, and its pictures."""
    prompt: list[int] = []
    pictures = []
    for digest, rows, columns, gap in draw(
        st.lists(st.tuples(DIGESTS, st.integers(1, 4), st.integers(1, 4), st.integers(0, 5)), max_size=4)
    ):
        prompt += [1] * gap
        pictures.append(Picture(digest, len(prompt), rows, columns))
        prompt += [9] * (rows * columns)
    return [*prompt, *[2] * draw(st.integers(1, 6))], tuple(pictures)


@given(placed())
def test_what_is_packed_is_parsed(case):
    prompt, pictures = case
    assert parse_pictures(pack_pictures(pictures)) == pictures
    SUPPORT.check_prompt(prompt, pictures)


@given(placed(), st.data())
def test_a_picture_changes_hashes_from_its_first_block_on(case, data):
    prompt, pictures = case
    plain = block_hashes(b"r" * 32, prompt, 4)
    told = block_hashes(b"r" * 32, prompt, 4, shown=partial(shown, pictures))
    first = pictures[0].start // 4 if pictures else len(plain)
    assert told[:first] == plain[:first]
    assert not set(told[first:]) & set(plain[first:])
    if pictures:
        index = data.draw(st.integers(0, len(pictures) - 1))
        old = pictures[index]
        new = Picture(bytes(16).hex(), old.start, old.rows, old.columns)
        others = tuple(new if each is old else each for each in pictures)
        again = block_hashes(b"r" * 32, prompt, 4, shown=partial(shown, others))
        changed = old.start // 4 if old.digest != new.digest else len(told)
        assert again[:changed] == told[:changed]
        assert not set(again[changed:]) & set(told[changed:])


ZERO = "0" * 32
MANY = ",".join(f"{ZERO}:{start}:1:1" for start in range(65))


@pytest.mark.parametrize(
    "packed",
    ["x", f"{ZERO}:0:0:1", f"{ZERO}:0:1:9999", f"{ZERO}:3:2:2,{ZERO}:5:1:1", "0:0:1:1", f"{ZERO}:0:1:1,", MANY],
)
def test_other_texts_are_refused(packed):
    with pytest.raises(InvalidArgument, match="pictures"):
        parse_pictures(packed)


def test_placeholders_and_pictures_belong_together():
    picture = Picture("0" * 32, 1, 1, 2)
    SUPPORT.check_prompt([1, 9, 9, 1], [picture])
    for prompt, pictures in (([1, 9, 9], []), ([1, 9, 9, 9], [picture]), ([1, 9, 1], [picture]), ([1], [picture])):
        with pytest.raises(InvalidArgument, match="same places"):
            SUPPORT.check_prompt(prompt, pictures)
    with pytest.raises(InvalidArgument, match="text alone"):
        PictureSupport().check_prompt([1, 9, 9], [picture])
    digests = {digest_pixels(b"abc", 1, 1, ""), digest_pixels(b"abc", 1, 1, "tenant")}  # not shared by tenants
    assert len({*digests, digest_pixels(bytes(12), 1, 4, ""), digest_pixels(bytes(12), 2, 2, "")}) == 4
