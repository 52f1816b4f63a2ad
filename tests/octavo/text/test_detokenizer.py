import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import Mismatch
from octavo.text.detokenizer import ByteTable, Detokenizer, build_byte_table

PARTS = [b"a", b" b", b"  ", b" ", b"", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"\xff"]
PARTS += ["é你".encode(), b"\xed\xa0"]
IDS = st.lists(st.integers(0, len(PARTS) + 2), max_size=5)
RULES = [*(ByteTable(PARTS, strip=n) for n in (0, 1, 3)), ByteTable(PARTS, bare_first=True)]


def whole(pieces, ids):
    """The slow, obvious definition."""
    parts = [PARTS[i] if i < len(PARTS) else b"" for i in ids]
    if pieces.bare_first and parts:
        parts[0] = parts[0].replace(b" ", b"")
    data = b"".join(parts)
    dropped = min(len(data) - len(data.lstrip(b" ")), pieces.strip)
    return data[dropped:].decode(errors="replace")


@pytest.mark.parametrize("pieces", RULES)
@given(chunks=st.lists(IDS, max_size=12))
def test_any_chunking_joins_to_the_whole(pieces, chunks):
    detokenizer, text, start = Detokenizer(pieces), "", 0
    ids = [token_id for chunk in chunks for token_id in chunk]
    for chunk in chunks:
        text += detokenizer.push(chunk)
        start += len(chunk)
        # Nothing that has come out is ever taken back, and only an unfinished character is missing.
        assert whole(pieces, ids).startswith(text)
        certain = whole(pieces, ids[:start])
        assert certain.startswith(text) and not certain[len(text) :].strip("\ufffd")
    assert text + detokenizer.flush() == whole(pieces, ids)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "CTC"}]}])
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder):
    with pytest.raises(Mismatch):
        build_byte_table(decoder, ["a"])
