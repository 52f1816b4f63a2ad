"""What workers and the store say of a sequence reaches the sessions of that sequence."""

from dataclasses import dataclass, field

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.step_item import StepItem
from octavo.store.calls import Notice
from router.session_registry import MAX_EARLY, Assignment, SessionRegistry


@dataclass(eq=False)
class FakeSession:
    seq_id: SequenceId
    owner: Incarnation = Incarnation("w")
    heard: list = field(default_factory=list)
    broken: bool = False

    def deliver_item(self, item):
        self._break()
        self.heard.append(item)

    def poll_record(self):
        self._break()
        self.heard.append("poll")

    def note_assignment(self, assignment):
        self.heard.append(assignment)

    def _break(self):
        if self.broken:
            raise ValueError("a defect")


def item_of(seq_id: SequenceId) -> StepItem:
    return StepItem(seq_id, epoch=1, branch=0, first_index=0, token_ids=[5], chain=0)


def test_the_sessions_concerned_are_told_and_a_defect_in_one_does_not_reach_another(caplog):
    registry, a, b, c = SessionRegistry(), SequenceId("a"), SequenceId("b"), SequenceId("c")
    broken, whole, other = FakeSession(a, broken=True), FakeSession(a), FakeSession(b, Incarnation("v"))
    for session in (broken, whole, other):
        registry.add(session)
    item, assignment = item_of(a), Assignment(1, Incarnation("w"), follows=True)
    assert registry.deliver_item(item)
    assert not registry.deliver_item(item_of(c))
    registry.poll_records([a])
    registry.poll_records_of_owner(Incarnation("v"))
    registry.announce_assignment(a, assignment)
    assert broken.heard == [assignment]
    assert caplog.text.count("a session failed") == 2
    assert whole.heard == [item, "poll", assignment]
    assert other.heard == ["poll"]
    assert not registry.remove(broken)
    assert registry.remove(whole)
    assert a not in registry
    assert len(registry) == 1


def test_a_session_that_comes_after_the_news_of_its_sequence_reads_the_record():
    """Another router may assign a sequence before this router has the reply that it was accepted."""
    registry, a, b = SessionRegistry(), SequenceId("a"), SequenceId("b")
    registry.announce_notice(Notice(a, "taken", 1, Incarnation("w")))
    registry.announce_assignment(b, Assignment(1, Incarnation("w"), follows=True))
    for seq_id in (a, b):
        late, later = FakeSession(seq_id), FakeSession(seq_id)
        registry.add(late)
        registry.add(later)
        assert (late.heard, later.heard) == (["poll"], [])


def test_only_so_many_sequences_without_a_session_are_remembered():
    registry = SessionRegistry()
    for number in range(MAX_EARLY + 1):
        registry.announce_notice(Notice(SequenceId(str(number)), "taken", 1, Incarnation("w")))
    oldest, next_oldest = FakeSession(SequenceId("0")), FakeSession(SequenceId("1"))
    for session in (oldest, next_oldest):
        registry.add(session)
    assert (oldest.heard, next_oldest.heard) == ([], ["poll"])
