"""Resume tokens come back as they were made, and nothing else is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import ForeignToken, HistoryLost, InvalidArgument
from router.streaming.resume_tokens import HEAD, MAC_BYTES, ResumeTokens, StreamPlace, StreamStart

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PLACES = st.lists(st.builds(StreamPlace, U32, U64, U32), min_size=1, max_size=16)
IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)
TENANTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)  # with bytes of places and lengths among them


@given(IDS, PLACES, TENANTS)
def test_round_trip(request_id, places, tenant):
    tokens = ResumeTokens(b"k" * 32, generation=7)
    point = tokens.read_token(tokens.make_token(request_id.encode(), places, tenant), tenant)
    assert (point.request_id, point.places, point.generation) == (request_id, places, 7)
    assert point.is_younger_than(60)
    assert not point.is_younger_than(-60)


@given(IDS, PLACES, st.data())
def test_any_changed_bit_is_refused(request_id, places, data):
    tokens = ResumeTokens(b"k" * 32)
    token = bytearray(tokens.make_token(request_id.encode(), places))
    at = data.draw(st.integers(0, len(token) - 1))
    token[at] ^= 1 << data.draw(st.integers(0, 7))
    refusal = (InvalidArgument, ForeignToken) if at < 5 else InvalidArgument  # after version and key id
    with pytest.raises(refusal, match="resume_token"):
        tokens.read_token(bytes(token))


@given(IDS, PLACES, TENANTS, TENANTS, st.integers(0, 64))
def test_another_tenant_s_token_is_refused(request_id, places, tenant, other, shared):
    """Nor does it help to move bytes between the tenant's name and what stands before the MAC."""
    tokens = ResumeTokens(b"k" * 32)
    token = tokens.make_token(request_id.encode(), places, tenant)
    for name in {other, tenant[shared:], tenant + other} - {tenant}:
        moved = tenant.encode()[: -len(name.encode()) or None] if tenant.endswith(name) else b""
        for forged in (token, token[:-MAC_BYTES] + moved + token[-MAC_BYTES:]):
            with pytest.raises(InvalidArgument):
                tokens.read_token(forged, name)


@given(IDS, PLACES, TENANTS, st.binary(min_size=1, max_size=40), st.data())
def test_no_other_length_is_read(request_id, places, tenant, more, data):
    tokens = ResumeTokens(b"k" * 32)
    token = tokens.make_token(request_id.encode(), places, tenant)
    at = data.draw(st.integers(5, len(token)))  # after version and key id
    until = data.draw(st.integers(0, len(token) - 1))
    for forged in (token[:at] + more + token[at:], token[:until], token[:at] + token[at + len(more) :]):
        if forged != token:
            with pytest.raises(InvalidArgument, match="resume_token"):
                tokens.read_token(forged, tenant)
    with pytest.raises((InvalidArgument, ForeignToken), match="resume_token"):
        tokens.read_token(more)


def test_tokens_of_the_last_keys_are_read_and_no_others():
    tokens = ResumeTokens(b"0" * 32, generation=0)
    made = [tokens.make_token(b"r", [StreamPlace(1, 2, 3)])]
    for generation in range(1, 5):
        tokens.use_key(str(generation).encode() * 32, generation)
        made.append(tokens.make_token(b"r", [StreamPlace(1, 2, 3)]))
    assert [tokens.read_token(token).generation for token in made[1:]] == [1, 2, 3, 4]
    for foreign in (made[0], bytes([1]) + made[1][1:]):  # of a key that is forgotten, of another version
        with pytest.raises(ForeignToken, match="request id"):
            tokens.read_token(foreign)
    with pytest.raises(InvalidArgument):
        tokens.read_token(made[1][: HEAD.size + 15])


def test_a_place_beyond_the_journal_is_lost_history():
    assert StreamPlace(3).index_within(3) == 3
    with pytest.raises(HistoryLost):
        StreamPlace(4).index_within(3)
    with pytest.raises(InvalidArgument):
        StreamStart([StreamPlace(0), StreamPlace(0)]).check_num_places(1)
    assert StreamStart().place_of(7) == StreamPlace(0)
