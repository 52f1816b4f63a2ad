import pytest
from effort import draws
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.request.errors import HistoryLost
from octavo.text.detokenizer import ByteTable, Detokenizer
from octavo.text.stop import StopMatcher, TextDelta, TextStream

ALPHABET = "abc"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
CHUNKS = st.lists(st.text(ALPHABET, max_size=6), max_size=12)
# Whole tokens, parts of characters, an end token, a token without text.
BYTE_TABLE = ByteTable([b"a", b"b", b"c", b"ab", b"bca", b"\xe4\xbd", b"\xa0", b"\xff", b"<end>", b""])
TOKENS = st.lists(st.integers(0, len(BYTE_TABLE.table) - 1), max_size=25)


def first_match(text, stops):
    """The slow, obvious definition: where the first completed stop string ends, and which it is."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def proper_prefix_at_end(text, stops):
    prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((length for length in range(1, len(text) + 1) if text[-length:] in prefixes), default=0)


@given(STOPS, CHUNKS, st.booleans())
def test_matches_the_definition_for_any_chunking(stops, chunks, include):
    """And holds back what may become a stop string, and nothing else."""
    matcher, shown, seen = StopMatcher(stops, include), "", ""
    for chunk in chunks:
        shown, seen = shown + matcher.push(chunk), seen + chunk
        assert include or matcher.stopped or shown == seen[: len(seen) - proper_prefix_at_end(seen, stops)]
    shown, text = shown + matcher.flush(), "".join(chunks)
    match = first_match(text, stops)
    if match is None:
        assert (shown, matcher.stopped, matcher.matched) == (text, False, "")
    else:
        end, stop = match
        assert matcher.stopped and matcher.matched == stop
        assert shown == (text[:end] if include else text[: end - len(stop)])


@settings(max_examples=draws(60, 300))
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    st.lists(st.tuples(st.text("ab", max_size=3), st.booleans()), max_size=8),
)
@example(["ab", "ba"], [("ab", False), ("a", True)])  # the end of one that did not count begins one that does
def test_unarmed_completions_are_text(stops, chunks):
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(chunk, armed) for chunk, armed in chunks) + matcher.flush()
    text, is_armed = "", [armed for chunk, armed in chunks for _ in chunk]
    for end, char in enumerate("".join(chunk for chunk, _ in chunks), 1):
        text += char
        found = [stop for stop in stops if text.endswith(stop)]
        if found and is_armed[end - 1]:
            text = text[: end - max(map(len, found))]
            break
    assert shown == text


def stream_of(stops=(), **options):
    return TextStream(Detokenizer(BYTE_TABLE), stops=stops, **options)  # type: ignore[arg-type]


def chunked(data, ids):
    chunks, start = [], 0
    while start < len(ids):
        size = data.draw(st.integers(1, len(ids) - start))
        chunks.append(ids[start : start + size])
        start += size
    return chunks


@given(STOPS, TOKENS, st.booleans(), st.integers(0, 8), st.sets(st.sampled_from([1, 8])), st.data())
def test_text_stream_is_the_same_for_any_chunking(stops, ids, include, min_tokens, hidden, data):
    options = {"include_stop": include, "min_tokens": min_tokens, "hidden_ids": hidden}
    whole, parts = stream_of(stops, **options), stream_of(stops, **options)
    expected = "".join(delta.text for delta in (whole.push(ids), whole.finish()))
    deltas = [parts.push(chunk) for chunk in chunked(data, ids)] + [parts.finish()]
    assert "".join(delta.text for delta in deltas) == expected
    last = whole.finish()
    assert (deltas[-1].num_tokens_used, deltas[-1].stopped) == (last.num_tokens_used, last.stopped)


@given(STOPS, TOKENS, st.integers(0, 8))
def test_a_completed_stop_string_ends_the_count(stops, ids, min_tokens):
    stream = stream_of(stops, min_tokens=min_tokens)
    delta = stream.push(ids)
    if not delta.stopped:
        assert delta.num_tokens_used == len(ids)
        return
    used = delta.num_tokens_used
    assert used >= min_tokens
    before = stream_of(stops, min_tokens=min_tokens)
    assert not before.push(ids[: used - 1]).stopped
    assert before.push(ids[used - 1 : used]).stopped
    assert stream.push([0, 1, 2]) == TextDelta("", used, True)


@given(TOKENS, st.sets(st.integers(0, 9)))
def test_without_stop_strings_all_visible_text_comes(ids, hidden):
    stream = stream_of(hidden_ids=hidden)
    text = stream.push(ids).text + stream.finish().text
    assert text == b"".join(BYTE_TABLE.table[i] for i in ids if i not in hidden).decode(errors="replace")


@given(STOPS, TOKENS, st.integers(0, 25), st.booleans())
def test_a_resumed_stream_says_everything_once(stops, ids, at, include):
    first = stream_of(stops, include_stop=include)
    delivered = first.push(ids[:at]).text
    rest = first.push(ids[at:]).text + first.finish().text
    # The journal may have grown between delivery and resumption, or not.
    for known in (ids[:at], ids):
        second = stream_of(stops, include_stop=include)
        again = second.resume(known, len(delivered.encode())).text
        again += second.push(ids[len(known) :]).text + second.finish().text
        assert again == rest


@given(STOPS, TOKENS, TOKENS, TOKENS, st.booleans())
def test_a_fork_goes_on_as_alone(stops, before, ours, other, include):
    parent, alone = stream_of(stops, include_stop=include), stream_of(stops, include_stop=include)
    parent.push(before)
    child = parent.fork()
    parent.push(other)
    alone.push(before)
    for stream in (child, alone):
        assert stream.stopped == bool(stream.matched)
    assert (child.push(ours), child.finish()) == (alone.push(ours), alone.finish())


def test_an_unexplained_delivery_is_history_lost():
    stream = stream_of()
    stream.resume([0], 7)
    with pytest.raises(HistoryLost):
        stream.finish()
    with pytest.raises(HistoryLost):
        stream_of().resume([5, 6], 1)
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
