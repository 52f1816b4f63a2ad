"""What an assigner makes of each answer of a worker, and which worker gets a sequence that may kill its worker."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accepted import accepted_sequence
from waiting import until
from worker_views import idle_view

from octavo.request.errors import BadModel, Loading, NoAdapterRoom, OutOfBlocks, StoreUnavailable, TooLarge
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import calls
from octavo.store.memory import MemoryState, MemoryStore
from octavo.store.memory.state import Trial
from octavo.wire.internal import admission_from_wire
from router.background_tasks import BackgroundTasks
from router.fleet.kv_index import HitCounts
from router.fleet.limits_registry import LimitsRegistry
from router.fleet.model_registry import ModelRegistry
from router.fleet.pending_dispatches import PendingDispatches
from router.fleet.worker_link import LinkError, ProbeResult
from router.placing import assigner as assigner_module
from router.placing.assigner import Assigner
from router.session_registry import SessionRegistry

ADMITTED = AdmissionAnswer(AdmissionOutcome.ADMITTED)
LATER = AdmissionAnswer(AdmissionOutcome.LATER, OutOfBlocks("full").failure())
NEVER = AdmissionAnswer(AdmissionOutcome.NEVER, TooLarge("never").failure())
REJECTED = AdmissionAnswer(AdmissionOutcome.REJECTED, BadModel("wrong").failure())
NAMES = "abcde"


LIMITS = calls.WorkerLimits("name", "weights", 8192, 16, 2000, 0, 64)  # of the workers that are there


def view(name, num_running=0, cached=0):
    return idle_view(name, num_running=num_running, num_cached_blocks=cached, num_blocks=2000)


class FakeLink:
    """A worker that gives one answer, and dies of the call if the answer is a LinkError."""

    def __init__(self, name, answer):
        self.incarnation, self.answer, self.numerics = Incarnation(name), answer, ""
        self.stays, self.lost = True, False
        self.facts, self.step_stream = SimpleNamespace(limits=LIMITS), SimpleNamespace(connected=True)
        self.pending_dispatches, self.admissions = PendingDispatches(), []
        self.found = ProbeResult.GONE

    async def schedule(self, admission, follow):
        self.admissions.append(admission_from_wire(admission))
        if isinstance(self.answer, LinkError):
            raise self.answer
        return self.answer

    async def probe(self):
        return self.found

    async def wait_to_replay(self, num_tokens):
        pass


class FakePool:
    def __init__(self, links):
        self.links = {link.incarnation: link for link in links}
        self.find_link, self.name_of, self.hits = self.links.get, str.upper, {}

    def views(self, model):
        return [
            replace(view(each.incarnation), numerics=each.numerics, stays=each.stays) for each in self.links.values()
        ]

    def find_hits(self, model, tokens, salt, lora, pictures=()):
        return self.hits


class FakeSession:
    """A session that notes what it is told."""

    owner = Incarnation("")

    def __init__(self, seq_id):
        self.seq_id, self.told = seq_id, []

    def note_assignment(self, assignment):
        self.told.append(assignment)

    def poll_record(self):
        self.told.append("poll")


class Scene:
    """One sequence that has been popped from the queue, and workers a, b, …, which are asked in this order.

    No worker renews its lease.
    """

    def __init__(self, store, models, answers):
        self.store = store
        self.links = [FakeLink(name, answer) for name, answer in zip(NAMES, answers, strict=False)]
        self.background = BackgroundTasks()
        sessions = SessionRegistry()
        limits = LimitsRegistry(store, lambda: {LIMITS}, 60_000)
        self.assigner = Assigner(store, FakePool(self.links), sessions, models, limits, self.background)
        self.seq_id = accepted_sequence().seq_id
        self.session = FakeSession(self.seq_id)
        sessions.add(self.session)

    async def assign(self):
        """Assigns the sequence and returns its record."""
        await self.assigner.assign_sequence(self.seq_id, 0, calls.TakeReason.QUEUED)
        assert not self.assigner.is_assigning(self.seq_id)
        return (await self.store.read(self.seq_id)).record

    def num_asked(self):
        return [len(link.admissions) for link in self.links]


@pytest.fixture
async def make_scene(hello):
    made: list[Scene] = []

    async def make(*answers, prompt=(1, 2), **changes):
        store, models = MemoryStore(MemoryState()), ModelRegistry()
        await models.add_worker(hello("a"))
        await store.heartbeat(calls.Member("router", Incarnation("router"), b""), 60_000)
        for name in NAMES:
            await store.heartbeat(calls.Member("worker", Incarnation(name), b""), 300)
        await store.accept(accepted_sequence(prompt, **changes), calls.QueueLimits())
        assert len(await store.pop("weights", 1, 60_000)) == 1
        made.append(Scene(store, models, answers))
        return made[-1]

    yield make
    for scene in made:
        await scene.background.close()


@pytest.mark.parametrize("of_one_class", [True, False])
async def test_workers_hear_where_the_prefix_is(make_scene, of_one_class):
    scene = await make_scene(LATER, ADMITTED, prompt=tuple(range(200)))
    size = view(Incarnation("a")).block_size
    scene.links[1].numerics = "" if of_one_class else "cpu/other"
    scene.assigner.pool.hits = {Incarnation("a"): HitCounts(5 * size)}
    await scene.assign()
    (first,), (second,) = (link.admissions for link in scene.links[:2])
    assert (first.prefix_owner, first.prefix_owner_tokens) == (None, 0), "it has the most of it itself"
    offered = ("a", 5 * size) if of_one_class else (None, 0)
    assert (second.prefix_owner, second.prefix_owner_tokens) == offered, "also if that one had no room"


async def lose_owner(scene, num_output):
    """The sequence has run on worker a, which has died."""
    request = calls.TakeRequest(scene.seq_id, 0, Incarnation("a"), "first", calls.TakeReason.QUEUED)
    assert (await scene.store.take_ownership(request)).epoch == 1
    item = calls.AppendItem(scene.seq_id, 1, 0, 0, tuple(range(num_output)))
    (reply,) = await scene.store.append_batch(Incarnation("a"), [item])
    assert reply.status is calls.AppendStatus.OK
    await scene.store.leave(calls.Member("worker", Incarnation("a"), b""))


@pytest.mark.parametrize(("buddy", "owner"), [("c", "c"), ("d", "d"), ("b", "c")])
async def test_a_sequence_without_owner_goes_to_the_worker_that_has_its_blocks(make_scene, buddy, owner):
    """That is its buddy, where it had one: routers know nothing else of buddies than their blocks. Here b has no room,
    and the worker that is asked next hears where prompt and output are."""
    scene = await make_scene(LATER, LATER, ADMITTED, ADMITTED, prompt=tuple(range(200)), max_tokens=400)
    await lose_owner(scene, 300)
    size = view(Incarnation("a")).block_size
    scene.assigner.pool.hits = {Incarnation(buddy): HitCounts(28 * size)}
    await scene.assigner.assign_sequence(scene.seq_id, 1, calls.TakeReason.LEASE)
    record = (await scene.store.read(scene.seq_id)).record
    assert record.owner == owner
    (admission,) = scene.links[NAMES.index(owner)].admissions
    hint = (None, 0) if buddy == owner else (buddy, 28 * size)
    assert (admission.prefix_owner, admission.prefix_owner_tokens) == hint


@pytest.mark.parametrize("refusal", [LATER, NEVER, LinkError("broken")], ids=["later", "never", "broken"])
async def test_after_refusals_the_next_worker_is_asked(make_scene, refusal):
    scene = await make_scene(refusal, ADMITTED)
    record = await scene.assign()
    assert (record.owner, record.epoch) == ("b", 2)
    assert scene.num_asked() == [1, 1]
    assert [link.pending_dispatches.num_sequences for link in scene.links] == [0, 1]
    assert record.crashes == isinstance(refusal, LinkError)  # the probe found the worker gone


@pytest.mark.parametrize(
    ("found", "broke", "lives", "crashes"),
    [
        (ProbeResult.UNKNOWN, True, False, 1),  # a slow link: the worker died, and another process listens by now
        (ProbeResult.UNKNOWN, True, True, 0),  # the store hears of it
        (ProbeResult.UNKNOWN, False, False, 0),  # it hangs, as far as the router knows
        (ProbeResult.ALIVE, True, False, 0),
    ],
)
async def test_a_crash_is_counted_where_the_connection_broke_and_a_probe_says_nothing(
    make_scene, found, broke, lives, crashes
):
    """Seed 344 of the simulation at 2b8a9fda: a poison request killed a fourth worker."""
    scene = await make_scene(LinkError("broken", lost_connection=broke), ADMITTED)
    scene.links[0].found = found
    renewing = asyncio.create_task(renew_lease(scene.store) if lives else asyncio.sleep(0))
    record = await scene.assign()
    renewing.cancel()
    await asyncio.wait([renewing])
    assert (record.owner, record.epoch, record.crashes) == ("b", 2, crashes)


async def renew_lease(store):
    """That of worker a, much more often than it must be."""
    while True:
        await store.heartbeat(calls.Member("worker", Incarnation("a"), b""), 1500)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("error", [NoAdapterRoom("full"), Loading("being read")])
async def test_a_sequence_whose_adapter_has_no_room_waits_before_it_is_asked_for_again(make_scene, monkeypatch, error):
    """Its worker stays available, and would be asked again at once."""
    monkeypatch.setattr(assigner_module, "REQUEUE_DELAY_S", 3600)
    scene = await make_scene(AdmissionAnswer(AdmissionOutcome.LATER, error.failure()))
    assigning = asyncio.create_task(scene.assign())
    await until(lambda: scene.num_asked() == [1])
    assert not (await asyncio.wait([assigning], timeout=0.2))[0]
    assigning.cancel()  # the router ends
    await asyncio.wait([assigning])
    assert (await scene.store.read(scene.seq_id)).record.state is SequenceState.QUEUED
    plain = await make_scene(LATER)
    assert (await plain.assign()).state is SequenceState.QUEUED


async def test_an_unreachable_worker_has_not_crashed(make_scene):
    """It goes on renewing its lease, so the router may only move what it has itself just placed there."""
    scene = await make_scene(LinkError("broken"), ADMITTED)

    async def renew():
        while True:
            await scene.store.heartbeat(calls.Member("worker", Incarnation("a"), b""), 300)
            await asyncio.sleep(0.03)

    renewing = asyncio.create_task(renew())
    record = await scene.assign()
    renewing.cancel()
    assert (record.owner, record.epoch, record.crashes) == ("b", 2, 0)


@pytest.mark.parametrize(
    ("broken", "num_dead"), [("", 3), ("a", 4), ("b", 4), ("c", 4)], ids=["whole", "first", "second", "third"]
)
async def test_a_sequence_that_kills_workers_ends(make_scene, caplog, broken, num_dead):
    """Each worker announces it and dies. One whose Step stream was broken before that may have been dead already, so
    its death does not count: it costs one worker more. Placement chooses only workers whose streams are open."""
    scene = await make_scene(*[LinkError("broken")] * len(NAMES))

    def deadly(link):
        schedule = link.schedule

        async def schedule_and_die(admission, follow):
            await scene.store.announce(admission.seq_id, admission.epoch, link.incarnation)
            return await schedule(admission, follow)

        return schedule_and_die

    for link in scene.links:
        link.schedule = deadly(link)
        link.step_stream.connected = link.incarnation != broken
    record = await scene.assign()
    assert record.state is SequenceState.FAILED
    assert "POISON_SUSPECTED" in record.failure
    assert sum(scene.num_asked()) == num_dead
    (text,) = [entry.message for entry in caplog.records if "POISON_SUSPECTED" in entry.message]
    assert all(f"{owner.upper()} ({owner})" in text for owner in record.suspects)
    assert len(record.suspects) == 3


async def replayed(scene, classes, *, staying=NAMES):
    """The class in which a sequence goes on whose owner, `a`, has died, or none; and how often that was another one."""
    for link, numerics in zip(scene.links, classes, strict=True):
        link.numerics, link.stays = numerics, link.incarnation in staying
    record = await scene.assign()
    await scene.store.append_batch(Incarnation("a"), [calls.AppendItem(scene.seq_id, record.epoch, 0, 0, [7])])
    await scene.store.leave(calls.Member("worker", Incarnation("a"), b""))
    await scene.assigner.assign_sequence(scene.seq_id, record.epoch, calls.TakeReason.LEASE)
    record = (await scene.store.read(scene.seq_id)).record
    assert scene.assigner.numerics_changes.total() == record.numerics_changes
    return (record.numerics if record.owner and record.owner != "a" else ""), record.numerics_changes


@pytest.mark.parametrize(
    ("answers", "classes", "staying", "expected"),
    [
        ([ADMITTED, ADMITTED, ADMITTED], "xyx", "abc", ("x", 0)),  # b would be asked first
        ([ADMITTED, ADMITTED], "xy", "ab", ("y", 1)),  # none of its own is left
        ([ADMITTED, ADMITTED, ADMITTED], "xyx", "ab", ("y", 1)),  # c is lost, or drains
        ([ADMITTED, ADMITTED, NEVER], "xyx", "abc", ("y", 1)),  # c can never hold it
        ([ADMITTED, ADMITTED, LATER], "xyx", "abc", ("", 0)),  # c has no room now: it waits
    ],
)
async def test_a_replay_stays_in_its_class(make_scene, answers, classes, staying, expected):
    assert await replayed(await make_scene(*answers), classes, staying=staying) == expected


async def suspect(scene, owners="xyz"):
    """Gives the sequence to one owner after the other has died; its epoch. The third one runs it alone."""
    epoch = 0
    for owner in owners:
        reason = calls.TakeReason.CONNECTION if epoch else calls.TakeReason.QUEUED
        taken = await scene.store.take_ownership(
            calls.TakeRequest(scene.seq_id, epoch, Incarnation(owner), owner, reason)
        )
        epoch = taken.epoch
        await scene.store.announce(scene.seq_id, epoch, Incarnation(owner))
    assert taken.suspect == (len(owners) == 3)
    return epoch


async def test_a_suspect_goes_where_no_other_suspect_runs(make_scene):
    scene = await make_scene(ADMITTED, ADMITTED)
    epoch, state = await suspect(scene, "xy"), scene.store.shared  # when y has died, too, it is to run alone
    until_ms = state.now_ms() + 60_000
    state.trials |= {Incarnation(name): Trial(SequenceId("other"), until_ms, begun=False) for name in "ab"}
    assigning = asyncio.create_task(scene.assigner.assign_sequence(scene.seq_id, epoch, calls.TakeReason.LEASE))
    await asyncio.sleep(0.1)
    assert not assigning.done()  # it waits for one of them
    del state.trials[Incarnation("b")]
    await assigning
    record = (await scene.store.read(scene.seq_id)).record
    assert (record.owner, record.crashes) == ("b", 2)
    assert scene.links[1].admissions[0].suspect
    assert scene.num_asked() == [0, 1]


@pytest.mark.parametrize("answers", [(NEVER,), (NEVER, NEVER), ()], ids=["one", "two", "none"])
@pytest.mark.parametrize(
    ("lost", "waits"),
    [({}, False), ({"num_blocks": 4000}, True), ({"num_blocks": 1000}, False), ({"fingerprint": "other"}, False)],
    ids=["as large", "larger", "smaller", "another model's"],
)
async def test_large_prompts_wait_for_a_lost_worker(make_scene, monkeypatch, answers, lost, waits):
    """Whether workers that are here refuse it, or a router sees by its length that it fits none of them."""
    monkeypatch.setattr(assigner_module, "REQUEUE_DELAY_S", 0.01)
    prompt = (1, 2) if answers else tuple(range(40_000))
    scene = await make_scene(*(answers or (ADMITTED,)), prompt=prompt)
    if not answers:
        lost = {"context_tokens": 50_000, **lost}
    await scene.store.note_limits([replace(LIMITS, **lost)], 60_000)
    record = await scene.assign()
    if not waits:
        assert record.state is SequenceState.FAILED
        assert "TOO_LARGE" in record.failure
        return
    for _ in range(3):
        async with asyncio.timeout(5):
            while not (popped := await scene.store.pop("weights", 1, 60_000)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await scene.assigner.assign_popped(popped[0])
    assert scene.num_asked() == ([1] * len(answers) or [0]), "nobody is asked again, which would cost an epoch"


async def test_without_the_store_nothing_is_too_large(make_scene, monkeypatch):
    scene = await make_scene(NEVER)

    async def away(*_):
        raise StoreUnavailable("away")

    monkeypatch.setattr(scene.store, "note_limits", away)
    assert not (await scene.assign()).state.ended


async def test_what_is_wrong_has_ended_or_is_past_asks_nobody_else(make_scene):
    scene = await make_scene(REJECTED, ADMITTED)
    assert (await scene.assign()).state is SequenceState.FAILED
    assert scene.num_asked() == [1, 0]
    scene = await make_scene(NEVER, ADMITTED)
    take = scene.store.take_ownership

    async def take_and_cancel(request):
        reply = await take(request)
        if request.reason is calls.TakeReason.REFUSED:  # the second take, after which the journals are read again
            await scene.store.finish(calls.Finish(scene.seq_id, FinishReason.CANCELLED))
        return reply

    scene.store.take_ownership = take_and_cancel
    assert (await scene.assign()).state is SequenceState.CANCELLED
    assert scene.num_asked() == [1, 0]
    scene = await make_scene(ADMITTED)
    await scene.assigner.assign_sequence(scene.seq_id, 7, calls.TakeReason.REFUSED)
    assert scene.num_asked() == [0]
    assert scene.session.told == ["poll"]
