"""However items come, a client gets each token once, in order, with exactly the text that belongs to them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.request.errors import HistoryLost
from octavo.request.hashing import extend_chain, prompt_chain
from octavo.request.sampling import FinishReason
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from router.streaming.branch_reader import BranchReader
from router.streaming.resume_tokens import StreamPlace

CHAIN = prompt_chain([1, 2])
TEXT = "naïve café 日本 stop here 🙂 and on"
TOKENS = list(TEXT.encode())


def reader(stops=()):
    return BranchReader(0, CHAIN, TextStream(ByteTokenizer().detokenizer(), stops=stops))


def runs(rng, count):
    """Runs of tokens that cover all tokens, with overlaps and repetitions and without a gap."""
    reached, made = 0, []
    while reached < count:
        first = rng.randint(0, reached)
        stop = rng.randint(first, min(count, first + 9))
        made.append((first, stop))
        reached = max(reached, stop)
    return made


@given(st.integers(0, 2**32).map(random.Random))
def test_any_overlapping_runs_give_each_token_once(rng):
    branch, pieces = reader(), []
    for first, stop in runs(rng, len(TOKENS)):
        chain = extend_chain(CHAIN, TOKENS[:stop])
        piece = branch.read_run(first, TOKENS[first:stop], chain, FinishReason.NONE)
        if piece:
            pieces.append(piece)
    pieces.append(branch.read_run(len(TOKENS), [], None, FinishReason.LENGTH))
    assert [token for piece in pieces for token in piece.token_ids] == TOKENS
    assert "".join(piece.text for piece in pieces) == TEXT
    assert branch.text_bytes == len(TEXT.encode())
    indexes = [piece.first_index for piece in pieces]
    assert indexes == sorted(indexes)


@given(st.integers(0, len(TOKENS)), st.booleans())
def test_resuming_anywhere_continues_the_text_exactly(cut, with_stop):
    stops = ("stop",) if with_stop else ()
    whole, first = reader(stops), reader(stops)
    everything = read_all(whole, 0)
    before = [p for p in [first.read_run(0, TOKENS[:cut], None, FinishReason.NONE)] if p]
    second = reader(stops)
    second.go_to_place(first.place, TOKENS)
    after = read_all(second, second.next_index) if not first.finish else []
    assert text(before) + text(after) == text(everything)
    if not first.finish:
        assert second.finish == whole.finish
        assert second.next_index == whole.next_index


def read_all(branch, start):
    piece = branch.read_run(start, TOKENS[start:], None, FinishReason.NONE)
    end = None if branch.finish else branch.read_run(len(TOKENS), [], None, FinishReason.LENGTH)
    return [p for p in (piece, end) if p]


def text(pieces):
    return "".join(piece.text for piece in pieces)


def test_another_history_is_data_loss():
    branch = reader()
    branch.read_run(0, TOKENS[:3], extend_chain(CHAIN, TOKENS[:3]), FinishReason.NONE)
    with pytest.raises(HistoryLost):
        branch.read_run(3, [1], extend_chain(CHAIN, [9, 9, 9, 1]), FinishReason.NONE)
    with pytest.raises(HistoryLost):
        reader().go_to_place(StreamPlace(3, CHAIN, 0), TOKENS)
    with pytest.raises(HistoryLost):
        reader().go_to_place(StreamPlace(4), TOKENS[:3])
