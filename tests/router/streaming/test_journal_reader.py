"""What the journals have is left to the worker's stream for a moment, and no longer."""

from dataclasses import replace

import pytest
from accepted import accepted_sequence

from octavo.request.errors import HistoryLost, NotFound, PoisonSuspected, StoreUnavailable
from octavo.request.ids import Incarnation
from octavo.request.record import Record, SequenceState, Snapshot, first_record
from octavo.request.sampling import FinishReason, SamplingParams
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from router.streaming import journal_reader
from router.streaming.delivery import Delivery
from router.streaming.journal_reader import JournalReader
from router.streaming.request_deadline import RequestDeadline
from router.streaming.resume_tokens import StreamPlace, StreamStart

PARAMS = SamplingParams(seed=1, max_tokens=9)
RECORD = replace(first_record(accepted_sequence((1, 2), PARAMS)), state=SequenceState.RUNNING)


class FakeStore:
    """A store with one record and one journal. A read fails if the next of `outages` says so."""

    def __init__(self) -> None:
        self.record: Record | None = RECORD
        self.journal = b""
        self.outages: list[bool] = []
        self.num_reads = 0
        self.generation = 1
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


class FakeOwnerLink:
    def __init__(self) -> None:
        self.record, self.is_streaming = RECORD, True


class Parts:
    def __init__(self, start: StreamStart) -> None:
        self.store, self.owner_link, self.deadline = FakeStore(), FakeOwnerLink(), RequestDeadline()
        detokenizer = ByteTokenizer().detokenizer
        self.delivery = Delivery(RECORD, PARAMS, lambda: TextStream.of_branch(detokenizer(), PARAMS, ()), start)
        self.reader = JournalReader(self.store, self.owner_link, self.delivery, self.deadline)

    async def read_and_deliver(self) -> bool:
        reading = await self.reader.read_on()
        assert reading is not None
        return self.reader.deliver(reading)

    def text(self) -> str:
        return "".join(piece.text for piece in iter(self.delivery.next_piece, None))


@pytest.fixture
def parts() -> Parts:
    return Parts(StreamStart(fresh=True))


async def test_news_are_left_to_the_stream_once(parts):
    parts.store.journal = b"ab"
    assert not await parts.read_and_deliver()
    assert parts.text() == ""
    assert await parts.read_and_deliver()
    assert parts.text() == "ab"
    parts.store.journal = b"abcd"
    assert not await parts.read_and_deliver()  # the stream is trusted again


async def test_news_are_delivered_at_once_without_a_stream_or_without_trust_in_it(parts):
    parts.owner_link.is_streaming, parts.store.journal = False, b"ab"
    assert await parts.read_and_deliver()
    parts.owner_link.is_streaming, parts.store.journal = True, b"abcd"
    parts.reader.distrust_stream()
    assert await parts.read_and_deliver()
    assert parts.text() == "abcd"
    parts.store.journal = b"abcdef"
    assert not await parts.read_and_deliver()  # one reading at once is enough


async def test_an_outage_is_borne_until_patience_ends(parts, monkeypatch):
    parts.store.outages = [True] * 3
    assert await parts.reader.read_on() is None
    monkeypatch.setattr(journal_reader, "STORE_PATIENCE_S", -1.0)
    with pytest.raises(StoreUnavailable, match="attach again"):
        await parts.reader.read_on()


async def test_an_answer_ends_the_outage(parts, monkeypatch):
    parts.store.outages = [True, False, True]
    assert await parts.reader.read_on() is None
    assert await parts.reader.read_on() is not None
    assert parts.reader._outage_since is None
    assert await parts.reader.read_on() is None


async def test_a_record_that_is_gone_too_early_is_lost(parts, monkeypatch):
    parts.store.record = None
    with pytest.raises(HistoryLost):
        await parts.reader.read_on()
    monkeypatch.setattr(journal_reader, "RETAIN_MS", 0)  # it may have ended longer ago than that
    with pytest.raises(NotFound):
        await parts.reader.read_on()
    parts.store.restarts = True
    with pytest.raises(HistoryLost):
        await parts.reader.read_on()


async def delivered(parts, journal) -> None:
    parts.store.journal = journal
    parts.reader.distrust_stream()
    assert await parts.read_and_deliver()
    assert parts.text() == journal.decode()


async def test_another_past_in_a_new_generation_is_lost_history(parts):
    """The end of the journal was lost, and another worker wrote another one: ABCDEF is not continued as ABCDEFcde."""
    await delivered(parts, b"ABCDEF")
    parts.store.journal, parts.store.restarts = b"ABCabcde", True
    with pytest.raises(HistoryLost, match="other tokens"):
        await parts.reader.read_on()
    assert parts.text() == ""


async def test_the_same_past_in_a_new_generation_goes_on(parts):
    await delivered(parts, b"ABCDEF")
    parts.store.journal, parts.store.generation = b"ABCDEFG", 2
    parts.reader.distrust_stream()
    assert await parts.read_and_deliver()
    assert parts.text() == "G"
    parts.reader.distrust_stream()
    parts.store.journal, num_reads = b"ABCDEFGH", parts.store.num_reads
    assert await parts.read_and_deliver()
    assert parts.text() == "H"
    assert parts.store.num_reads == num_reads + 1  # from the next index on again


@pytest.mark.parametrize(("journal", "text"), [(b"ABCDEFG", "G"), (b"ABCdefgh", None)])
async def test_a_shorter_past_is_waited_for_while_the_sequence_runs(parts, journal, text):
    await delivered(parts, b"ABCDEF")
    parts.store.journal, parts.store.restarts = b"ABC", True
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


async def test_a_shorter_past_of_an_ended_sequence_is_lost_history(parts):
    await delivered(parts, b"ABCDEF")
    parts.store.record = replace(RECORD, state=SequenceState.DONE, finishes=(FinishReason.LENGTH,))
    parts.store.journal, parts.store.restarts = b"ABC", True
    with pytest.raises(HistoryLost, match="lost tokens"):
        await parts.reader.read_on()


async def test_a_reading_tells_of_failure_deadline_and_owner(parts):
    failure = PoisonSuspected("three died").failure()
    owner = Incarnation("w")
    parts.store.record = replace(RECORD, failure=failure.to_json(), deadline_ms=900, owner=owner)
    await parts.reader.read_on()
    assert parts.delivery.failure == failure
    assert parts.deadline.is_past(float("inf"))
    assert parts.owner_link.record.owner == owner


async def test_the_start_is_where_the_client_is(monkeypatch):
    monkeypatch.setattr(journal_reader, "REPAIR_S", 0.0)
    parts = Parts(StreamStart([StreamPlace(2)]))
    parts.store.journal = b"abcd"
    await parts.reader.go_to_start()
    assert parts.text() == "cd"
    assert parts.store.num_reads == 1


async def test_a_journal_that_is_too_short_is_read_again_and_then_lost(monkeypatch):
    monkeypatch.setattr(journal_reader, "REPAIR_S", 0.0)
    parts = Parts(StreamStart([StreamPlace(5)]))
    parts.store.journal = b"abcd"
    with pytest.raises(HistoryLost):
        await parts.reader.go_to_start()
    assert parts.store.num_reads == 1 + journal_reader.REPAIR_TRIES
