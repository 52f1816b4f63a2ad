"""Random operations over a tiny alphabet on MemoryStore and a real server at once: replies and state must be equal.

Along the way the invariants of docs/protocol.md that a store can break are asserted.
"""

import asyncio
import re

import pytest
from effort import draws
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.limits import TenantQuota
from octavo.request.sampling import FinishReason
from octavo.store import library, worker_tail
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    QueueLimits,
    Renewal,
    TakeReason,
    TakeRequest,
    WorkerLimits,
)

NAMES = {"a": 1, "b": 2, "c": 1}  # sequences and their branches; an ended one gets a successor of the same name
LIMITS = [
    QueueLimits(max_requests=3, max_tokens=160),
    QueueLimits(max_requests=3, max_tokens=6400, tenant_requests=1),
    QueueLimits(max_requests=2, max_tokens=6400, tenant_tokens=50),
    QueueLimits(max_requests=3, max_tokens=6400, quota=TenantQuota(max_streams=1)),
    QueueLimits(max_requests=3, max_tokens=6400, quota=TenantQuota(2, 60)),
    QueueLimits(max_requests=3, max_tokens=6400, quota=TenantQuota(tokens_per_minute=77)),
]
NAME = st.sampled_from(sorted(NAMES))
PICTURES = {False: "", True: f"{'0' * 32}:0:1:1"}
LAG = st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1])  # of the epoch that is named behind the true one
SEEN = st.sampled_from(["", "worker w: Schedule: UNAVAILABLE", " two\nlines "])
MODELS = {"a": "m1", "b": "m1", "c": "m2"}
MODEL = st.sampled_from(["m1", "m1", "m2"])
ROUTER = st.sampled_from([Incarnation("router1"), Incarnation("router2")])
WORKER = st.sampled_from([Incarnation("worker1"), Incarnation("worker2"), Incarnation("worker3")])
OPERATION = st.sampled_from(["x", "y", "z"])
NUMBER = st.sampled_from([1, 1, 2, 3])  # of a migration
SOME = st.lists(st.integers(0, 1), min_size=1, max_size=3)
MANY = st.lists(st.integers(0, 1), min_size=16, max_size=16)
WRITTEN = st.just(None)  # the tokens that are there already
REASON = st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.NONE])
MAYBE_REASON = st.one_of(st.just(FinishReason.NONE), st.just(FinishReason.NONE), REASON)
BRANCH = st.sampled_from([0, 0, 0, 1, 1, 2])
GOOD = st.tuples(NAME, st.just(0), st.sampled_from([0, 0, 1]), st.just(0), SOME | MANY, st.just(FinishReason.NONE))
WILD = st.tuples(NAME, LAG, BRANCH, st.integers(-2, 1), st.just([]) | SOME | MANY | WRITTEN, MAYBE_REASON)
LIMITS_SEEN = st.builds(WorkerLimits, *map(st.sampled_from, (["a", "b c"], ["f"], [8], [4], [1, 2], [0], [3])))
TIMES = [1, 1, 10, 10, 50, 1000, 3000, 61_000]


class Differential(RuleBasedStateMachine):
    """`reference` and `real` get the same operations and the same time."""

    @initialize(
        begun=st.tuples(*[st.sampled_from(["running", "running", "queued", "not yet"])] * len(NAMES)),
        leases=st.tuples(*[st.booleans()] * 2),
    )
    def begin(self, begun, leases):
        self.reference = self.make_reference()
        self.real = self.runner.run(self.make_real())
        self.seq_ids = {name: sequence_id("tenant", RequestId(name)) for name in NAMES}
        self.last = {}
        self.generation = 0
        for name, how in zip(NAMES, begun, strict=True):
            if how != "not yet":
                self.accept(name, Incarnation("router1"), 0, name == "a", b"1", 3, LIMITS[0], name, 0)
            if how == "running":
                self.place(name, Incarnation("worker1"), "x")
            self.equal()
        for member, alive in zip(("router1", "worker1"), leases, strict=True):
            if alive:
                self.member(Incarnation(member), "heartbeat", 100_000, b"", "", "")

    def teardown(self):
        if hasattr(self, "real"):
            assert not self.runner.run(self.real.keys_for_ever())
            self.runner.run(self.real.close())

    def both(self, method, *args, **kwargs):
        """The reply, which both must give."""
        expected = self.runner.run(getattr(self.reference.store, method)(*args, **kwargs))
        actual = self.runner.run(getattr(self.real.store, method)(*args, **kwargs))
        assert actual == expected
        return actual

    def epoch(self, name, lag):
        snapshot = self.last.get(name)
        return max(0, snapshot.record.epoch - lag) if snapshot else 0

    def owner(self, name):
        return self.last[name].record.owner if name in self.last else Incarnation("worker1")

    @rule(
        name=NAME,
        router=ROUTER,
        deadline=st.sampled_from([0, 0, 50]),
        keep=st.booleans(),
        body=st.sampled_from([b"1", b"1", b"2"]),
        priority=st.integers(2, 3),
        limits=st.sampled_from(LIMITS),
        tenant=st.sampled_from(["a", "b"]),
        retain_ms=st.sampled_from([0, 5_000_000]),
    )
    def accept(self, name, router, deadline, keep, body, priority, limits, tenant, retain_ms):
        before = self.last.get(name)
        if before is not None and before.record.state.ended and priority == 2:
            self.seq_ids[name] = sequence_id("tenant", RequestId(self.seq_ids[name]))
            del self.last[name]
        request = self.new(
            name, seq_id=self.seq_ids[name], router=router, deadline_in_ms=deadline, keep_on_disconnect=keep,
            body_hash=body, priority=priority, num_branches=NAMES[name], max_tokens=40, model=MODELS[name],
            tenant=tenant, notes=b"notes" if keep else b"", retain_ms=retain_ms, pictures=PICTURES[keep],
        )  # fmt: skip
        if keep:
            self.both("keep_picture", self.seq_ids[name], "digest", name.encode())
        self.both("accept", request, limits)

    @rule(name=NAME, comes_again=st.booleans())
    def forget(self, name, comes_again):
        if self.both("forget", self.seq_ids[name]) and self.last.pop(name, None) and not comes_again:
            self.seq_ids[name] = sequence_id("tenant", RequestId(self.seq_ids[name]))

    @rule(model=MODEL, count=st.integers(1, 2), places=st.integers(0, 3), most_kept=st.integers(0, 3))
    def pop(self, model, count, places, most_kept):
        self.both("pop", model, count, 30, places, most_kept)

    @rule(name=NAME, lag=LAG, seen=SEEN)
    def requeue(self, name, lag, seen):
        self.both("requeue", self.seq_ids[name], self.epoch(name, lag), seen)

    @rule(
        name=NAME,
        lag=LAG,
        worker=WORKER,
        take_id=OPERATION,
        why=st.sampled_from(TakeReason),
        waited_ms=st.sampled_from([0, 0, 9_999, 10_000]),
        numerics=st.sampled_from(["", "cpu/a", "cpu/b"]),
        seen=SEEN,
    )
    def take(self, name, lag, worker, take_id, why, waited_ms, numerics, seen):
        seq_id, epoch = self.seq_ids[name], self.epoch(name, lag)
        request = TakeRequest(seq_id, epoch, worker, take_id, why, waited_ms, numerics, seen)
        self.both("take_ownership", request)

    @rule(name=NAME, lag=LAG, owner=st.none() | WORKER)
    def announce(self, name, lag, owner):
        reply = self.both("announce", self.seq_ids[name], self.epoch(name, lag), owner or self.owner(name))
        assert reply in (True, False)

    @rule(name=NAME, lag=LAG, owner=st.none() | WORKER, tokens=st.sampled_from([1, 15, 16, 16, 31, 32, 48]))
    def progress(self, name, lag, owner, tokens):
        self.both("note_progress", self.seq_ids[name], self.epoch(name, lag), owner or self.owner(name), tokens)

    @rule(name=NAME, worker=WORKER, take_id=OPERATION)
    def place(self, name, worker, take_id):
        self.take(name, 0, worker, take_id, TakeReason.QUEUED, 0, "", "")

    @rule(name=NAME, worker=WORKER, take_id=OPERATION, why=st.sampled_from([TakeReason.CONNECTION, TakeReason.LEASE]))
    def rescue(self, name, worker, take_id, why):
        self.take(name, 0, worker, take_id, why, 0, "", "")

    @rule(
        name=NAME,
        workers=st.permutations(["worker1", "worker2", "worker3"]),
        spared=st.sampled_from([0, 1, 2, 2, 2, 2]),
        announced=st.sampled_from([True, True, True, False]),
        tokens=st.sampled_from([0, 0, 0, 15, 16, 40]),
    )
    def crash_again_and_again(self, name, workers, spared, announced, tokens):
        for worker in workers[spared:]:
            self.equal()
            if announced and name in self.last:
                self.announce(name, 0, None)
            if tokens and name in self.last:
                self.progress(name, 0, None, tokens)
            self.rescue(name, Incarnation(worker), f"t{self.epoch(name, 0)}", TakeReason.CONNECTION)

    @rule(items=st.lists(GOOD, min_size=1, max_size=3))
    def append(self, items):
        self.append_all(None, items)

    @rule(owner=st.none() | WORKER, items=st.lists(WILD, min_size=1, max_size=3))
    def append_anything(self, owner, items):
        self.append_all(owner, items)

    def append_all(self, owner, items):
        """None: the owner of the first item's sequence. No worker sends an item without tokens and without an end."""
        appends = [each for each in (self.item(*item) for item in items) if each.token_ids or each.finish]
        owner = owner or self.owner(items[0][0])
        replies = self.both("append_batch", owner, appends)
        for item, reply in zip(appends, replies, strict=True):
            name = next(name for name, seq_id in self.seq_ids.items() if seq_id == item.seq_id)
            if reply.status in (AppendStatus.OK, AppendStatus.OK_CANCEL):
                record = self.last[name].record
                assert (item.epoch, owner) == (record.epoch, record.owner)  # I6

    def item(self, name, lag, branch, offset, tokens, finish):
        """At or near the journal's end; tokens None: those that are there already."""
        snapshot = self.last.get(name)
        journal = snapshot.outputs[branch] if snapshot and branch < len(snapshot.outputs) else ()
        first = max(0, len(journal) + offset)
        token_ids = list(journal[first:]) if tokens is None else tokens
        failure = "boom" if finish is FinishReason.ERROR else ""
        score = -0.1 * len(journal) if finish is FinishReason.LENGTH else None
        cached = 16 if len(token_ids) == 2 else 0
        at = self.seq_ids[name], self.epoch(name, lag), branch, first
        return AppendItem(*at, token_ids, finish, failure, score, cached)

    @rule(
        name=NAME,
        how=st.sampled_from(["cancel", "finish", "neither"]),
        branch=st.sampled_from([None, 0, 0, 1]),
        reason=REASON,
        length=st.sampled_from([None, None, 0, 1, 20]),
        lag=st.none() | LAG,
    )
    def end(self, name, how, branch, reason, length, lag):
        if how == "cancel":
            self.both("cancel", self.seq_ids[name])
        elif how == "finish":
            score = -0.5 * length if length and length % 2 else None
            delivered = None if branch is None else length
            epoch = None if lag is None else self.epoch(name, lag)
            self.both("finish", Finish(self.seq_ids[name], reason, branch, delivered, "why not", score, epoch))

    @rule(name=NAME, router=ROUTER, how=st.sampled_from(["attach", "detach"]))
    def client(self, name, router, how):
        self.both(how, self.seq_ids[name], router)

    @rule(
        name=NAME,
        lag=LAG,
        how=st.sampled_from(["begin", "commit", "abort"]),
        number=st.none() | NUMBER,
        worker=st.none() | WORKER,
        behind=st.sampled_from([0, 0, 0, 1]),
    )
    def migrate(self, name, lag, how, number, worker, behind):
        """None: the migration that is going on, and its target."""
        record = self.last[name].record if name in self.last else None
        target = worker or Incarnation(record.mig_to if record else "worker1")
        operation = [self.seq_ids[name], self.epoch(name, lag), number or (record.mig_number if record else 0) or 1]
        if how == "begin":
            self.both("mig_begin", *operation, target or Incarnation("worker1"))
        elif how == "commit":
            self.both("mig_commit", *operation, target, [n + behind for n in record.num_tokens] if record else [0])
        else:
            self.both("mig_abort", *operation)

    @rule(name=NAME, worker=WORKER, again=st.booleans(), behind=st.sampled_from([0, 0, 0, 1]), late=st.booleans())
    def migrate_through(self, name, worker, again, behind, late):
        self.migrate(name, 0, "begin", 4, worker, 0)
        for _ in range(1 + again):
            self.migrate(name, 0, "commit", 4, worker, behind)
        if late:
            self.migrate(name, 0, "abort", 4, worker, 0)
        self.equal()

    @rule(
        member=ROUTER | WORKER,
        how=st.sampled_from(["heartbeat", "heartbeat", "heartbeat", "register", "leave"]),
        lease_ms=st.sampled_from([20, 2000, 100_000]),
        info=st.binary(max_size=2),
        name=st.sampled_from(["", "", "w", "w", "a worker"]),
        endpoint=st.sampled_from(["h:1", "h:2"]),
    )
    def member(self, member, how, lease_ms, info, name, endpoint):
        described = Member(member[:6], member, info, name, endpoint)
        reply = self.both(how, described, *([] if how == "leave" else [lease_ms]))
        holder = reply.holder if isinstance(reply, Renewal) else reply
        assert holder is None or holder.id != member

    @rule(seen=st.sets(LIMITS_SEEN, max_size=2), kept_ms=st.sampled_from([0, 50, 3000]))
    def note_limits(self, seen, kept_ms):
        assert seen <= set(self.both("note_limits", seen, kept_ms))

    @rule(
        ms=st.sampled_from(TIMES),
        limit=st.sampled_from([1, 10, 10]),
        grace_ms=st.sampled_from([0, 40, 3000]),
        interval_ms=st.sampled_from([0, 0, 50]),
    )
    def sweep(self, ms, limit, grace_ms, interval_ms):
        self.advance(ms)
        self.both("sweep", limit, grace_ms, interval_ms)

    @rule(ms=st.sampled_from(TIMES))
    def advance(self, ms):
        self.runner.run(self.reference.advance(ms))
        self.runner.run(self.real.advance(ms))

    @rule(ms=st.sampled_from([1, 10, 50, 3000]))
    def restart(self, ms):
        self.runner.run(self.reference.restart())
        self.runner.run(self.real.restart())
        self.both("queue_depth")  # the first call after a restart begins the new generation
        self.advance(ms)

    # What must be equal, and what must hold

    @invariant()
    def equal(self):
        if not hasattr(self, "real"):
            return
        expected, actual = (self.runner.run(self.state(bench)) for bench in (self.reference, self.real))
        assert actual == expected
        for name, snapshot in zip(NAMES, actual[0], strict=True):
            if snapshot is not None:
                self.holds(self.last.get(name), snapshot)
                self.last[name] = snapshot
            else:
                assert name not in self.last  # nothing vanishes before its time
        assert self.real.store.generation == self.reference.store.generation >= self.generation  # I7
        self.generation = self.real.store.generation

    async def state(self, bench):
        """All there is to see of a store."""
        store = bench.store
        reads = [
            store.read(self.seq_ids[name], prompt=True, from_indexes=[0] * branches) for name, branches in NAMES.items()
        ]
        snapshots, live, *rest = await asyncio.gather(
            asyncio.gather(*reads),
            store.list_sequences(None, 10),
            store.list_sequences(Incarnation("worker2"), 10),
            *(store.owned(Incarnation(f"worker{number}")) for number in (1, 2, 3)),
            store.members("worker"),
            store.members("router"),
            store.queue_depth(),
            store.tenant_depths(2),
            store.model_depths(),
            *(bench.used_quota(tenant) for tenant in ("a", "b")),
            *(store.read_notes(self.seq_ids[name]) for name in NAMES),
        )
        shows = [each.record.seq_id for each in snapshots if each is not None and each.record.pictures]
        pictures = [await store.read_picture(seq_id, "digest") for seq_id in shows]
        return snapshots, sorted(live, key=lambda record: record.seq_id), rest, pictures

    def holds(self, before, now):
        record = now.record
        assert all(length <= record.max_tokens for length in record.num_tokens)  # I11
        assert record.num_tokens == tuple(len(output) for output in now.outputs)
        assert all(cut <= length for cut, length in zip(record.final_lengths, record.num_tokens, strict=True))
        assert record.state.ended == (FinishReason.NONE not in record.finishes)  # ended as a whole, or not at all
        assert (record.owner != "") or record.state != "RUNNING"
        assert len(record.timeline) <= 32
        if before is None:
            return
        for old, new in zip(before.outputs, now.outputs, strict=True):
            assert new[: len(old)] == old  # I1, I4
        assert record.epoch >= before.record.epoch  # I7
        if record.epoch == before.record.epoch and before.record.state == "RUNNING":
            assert record.owner == before.record.owner  # I5
        for branch, (old, new) in enumerate(zip(before.record.finishes, record.finishes, strict=True)):
            cut = record.final_lengths[branch] < before.record.final_lengths[branch]
            earlier = cut and old is FinishReason.LENGTH and new is FinishReason.STOP
            assert old in (FinishReason.NONE, new) or earlier  # an end is final, or was found to lie earlier
        if before.record.state.ended:
            assert (record.state, now.outputs) == (before.record.state, before.outputs)


@pytest.fixture
async def documented_user(server_bench, root):
    """The one in docs/store.md, which is that of `octavo store-acl`."""
    text = (root / "docs/store.md").read_text()
    [(called, commands)] = re.findall(r"needs these rights:\s+`([^`]*)`[^`]*```text\n([^`]*)```", text)
    rules = [*called.split(), *(f"+{command}" for command in commands.split())]
    assert {*rules, "-@all"} == set(library.user_rules())
    await server_bench.client.execute_command("ACL", "SETUSER", "documented", "reset", "on", ">pass", *rules)
    return "documented:pass"


@pytest.mark.scaled
@pytest.mark.timeout(600)
def test_the_server_does_what_the_reference_does(
    server, runner, make_memory_bench, make_redis_bench, new, documented_user, monkeypatch
):
    """For a user who has the rights in docs/store.md alone. And no key is there for ever."""
    monkeypatch.setattr(worker_tail, "MAX_TAIL_BYTES", 150)  # so that there are checkpoints
    parts = {"runner": runner, "make_reference": staticmethod(make_memory_bench), "new": staticmethod(new)}
    parts["make_real"] = staticmethod(lambda: make_redis_bench(server.url, documented_user))
    asked = settings().max_examples
    few = draws(11, 90)  # seconds; `--hypothesis-profile=nightly` for many
    chosen = {"max_examples": asked if asked > 1000 else few, "stateful_step_count": 40, "deadline": None}
    run_state_machine_as_test(
        type("Machine", (Differential,), parts), settings=settings(**chosen, suppress_health_check=list(HealthCheck))
    )
