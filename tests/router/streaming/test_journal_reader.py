"""What the journals have is left to the worker's stream for a moment, and no longer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from accepted import accepted_sequence

from octavo.request.errors import HistoryLost, NotFound, StoreUnavailable
from octavo.request.record import SequenceState, Snapshot, first_record
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from router.streaming import journal_reader
from router.streaming.delivery import Delivery
from router.streaming.journal_reader import JournalReader
from router.streaming.request_deadline import RequestDeadline
from router.streaming.resume_tokens import StreamPlace, StreamStart

PARAMS = SamplingParams(seed=1, max_tokens=9)
RECORD = replace(first_record(accepted_sequence((1, 2), PARAMS)), state=SequenceState.RUNNING)


class FakeStore:
    """A store with one record and one journal. A read fails if the next of `outages` says so."""

    def __init__(self):
        self.record, self.journal, self.outages, self.num_reads, self.generation = RECORD, b"", [], 0, 1
        self.restarts = False  # whether the next read is the first one that is answered by a new generation

    async def read(self, seq_id, *, from_indexes):
        self.num_reads += 1
        if self.outages and self.outages.pop():
            raise StoreUnavailable("down")
        if self.restarts:
            self.generation, self.restarts = self.generation + 1, False
        if self.record is None:
            return None
        return Snapshot(replace(self.record), (), (tuple(self.journal[from_indexes[0] :]),), 1000)


class Parts:
    def __init__(self, *places, stream_has_more=False):
        self.store, owner_link = FakeStore(), SimpleNamespace(record=RECORD, is_streaming=True)
        start = StreamStart(list(places)) if places else StreamStart(fresh=True)
        self.delivery = Delivery(RECORD, PARAMS, self.text_stream, start)
        deadline, more = RequestDeadline(), stream_has_more
        self.reader = JournalReader(self.store, owner_link, self.delivery, deadline, stream_has_more=more)

    @staticmethod
    def text_stream():
        return TextStream.of_branch(ByteTokenizer().detokenizer(), PARAMS, ())

    async def read_and_deliver(self):
        reading = await self.reader.read_on()
        assert reading is not None
        return self.reader.deliver(reading)

    def text(self):
        return "".join(piece.text for piece in iter(self.delivery.next_piece, None))

    async def delivered(self, journal):
        self.store.journal = journal
        self.reader.distrust_stream()
        assert await self.read_and_deliver()
        assert self.text() == journal.decode()


@pytest.fixture
def parts():
    return Parts()


async def test_an_outage_is_borne_until_patience_ends(parts, monkeypatch):
    parts.store.outages = [True] * 3
    assert await parts.reader.read_on() is None
    monkeypatch.setattr(journal_reader, "STORE_PATIENCE_S", -1.0)
    with pytest.raises(StoreUnavailable, match="attach again"):
        await parts.reader.read_on()


@pytest.mark.parametrize("stream_has_more", [False, True])
async def test_the_stream_is_waited_for_longer_if_it_has_more(monkeypatch, stream_has_more):
    """A slow machine is no reason to do without log probabilities that are on their way."""
    parts = Parts(stream_has_more=stream_has_more)
    parts.store.journal = b"AB"
    assert [await parts.read_and_deliver() for _ in range(3)] == [False, not stream_has_more, not stream_has_more]
    monkeypatch.setattr(parts.reader, "_left_until", 0.0)  # its patience has ended
    assert await parts.read_and_deliver()
    assert parts.text() == "AB"


async def test_a_record_gone_too_early_is_lost(parts, monkeypatch):
    parts.store.record = None
    with pytest.raises(HistoryLost):
        await parts.reader.read_on()
    monkeypatch.setattr(journal_reader, "RETAIN_MS", 0)  # it may have ended longer ago than that
    with pytest.raises(NotFound):
        await parts.reader.read_on()
    parts.store.restarts = True
    with pytest.raises(HistoryLost):
        await parts.reader.read_on()


@pytest.mark.parametrize(("journal", "text"), [(b"ABCDEFG", "G"), (b"ABCdefgh", None), (b"ended", None)])
async def test_a_shorter_past_is_waited_for(parts, journal, text):
    await parts.delivered(b"ABCDEF")
    parts.store.journal, parts.store.restarts = b"ABC", True
    if journal == b"ended":  # nothing comes any more
        parts.store.record = replace(RECORD, state=SequenceState.DONE, finishes=(FinishReason.LENGTH,))
        with pytest.raises(HistoryLost, match="lost tokens"):
            await parts.reader.read_on()
        return
    for _ in range(2):
        parts.reader.distrust_stream()
        assert not await parts.read_and_deliver()
        assert not parts.reader.is_verified
    assert parts.text() == ""
    parts.store.journal = journal
    if text is None:
        with pytest.raises(HistoryLost):
            await parts.reader.read_on()
    else:
        assert await parts.read_and_deliver()
        assert parts.text() == text


async def test_a_short_journal_is_read_again(monkeypatch):
    monkeypatch.setattr(journal_reader, "REPAIR_S", 0.0)
    parts = Parts(StreamPlace(5))
    parts.store.journal = b"abcd"
    with pytest.raises(HistoryLost):
        await parts.reader.go_to_start()
    assert parts.store.num_reads == 1 + journal_reader.REPAIR_TRIES
