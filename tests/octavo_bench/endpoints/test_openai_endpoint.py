"""Server-sent events come out whole, in whatever pieces their bytes arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_bench.endpoints import openai_endpoint
from octavo_bench.endpoints.base import RequestFailed
from octavo_bench.endpoints.openai_endpoint import ServerSentEvents

STREAM = (
    b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\n\n\nid: 3\ndata: [DONE]\n\ndata: unfinished'
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_pieces_give_the_same_events(cuts):
    reader, found = ServerSentEvents(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(places):
        found += reader.feed(STREAM[begin:end])
    assert found == EVENTS


def test_an_event_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(openai_endpoint, "MAX_EVENT_BYTES", 100)
    reader = ServerSentEvents()
    with pytest.raises(RequestFailed):
        for _ in range(100):
            list(reader.feed(b"data: xxxxxxxxxx"))
