"""A lookup finds where a text goes on as it did before, whenever it is asked."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.drafting import text_lookup
from gpu_worker.drafting.text_lookup import MAX_MATCH, SIZE, TextLookup

texts = st.lists(st.integers(0, 2), max_size=60)


def match(tokens: list[int], place: int) -> int:
    """How many tokens before `place` are the last tokens, as far as it counts."""
    length = 0
    while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_a_place_is_found_where_there_is_one_and_goes_on_as_the_text_does(tokens, asked, count):
    lookup = TextLookup(0)
    for end in range(len(tokens) + 1):
        if end not in asked and end < len(tokens):
            continue
        before = tokens[:end]
        length = lookup.find(before)
        lengths = [match(before, other) for other in range(SIZE, end)]
        if not length:
            assert max(lengths, default=0) < SIZE
            continue
        last = max(other for other in range(SIZE, end) if before[other - SIZE : other] == before[-SIZE:])
        assert length >= max(SIZE, match(before, last))
        drafts = lookup.draft(before, count)
        assert len(drafts) == count
        whole = [*before, *drafts]  # it may go on into what it has guessed itself
        assert any(
            lengths[place - SIZE] == length and drafts == whole[place : place + count] for place in range(SIZE, end)
        )


def test_a_long_text_is_indexed_piece_by_piece(monkeypatch):
    monkeypatch.setattr(text_lookup, "INDEXED_AT_ONCE", 10)
    tokens = [*range(40), 0, 1, 2]
    lookup = TextLookup(len(tokens))
    found = [lookup.find(tokens) for _ in range(5)]
    assert found == [0, 0, 0, 3, 3]
    assert lookup.draft(tokens, 3) == [3, 4, 5]


def test_the_beginning_of_a_very_long_text_is_forgotten(monkeypatch):
    monkeypatch.setattr(text_lookup, "MAX_INDEXED", 20)
    tokens = [*range(40), 0, 1, 2]
    assert TextLookup(len(tokens)).find(tokens) == 0
    later = [*tokens, 30, 31, 32]
    lookup = TextLookup(len(tokens))
    assert lookup.find(later) == 3 and lookup.draft(later, 2) == [33, 34]
