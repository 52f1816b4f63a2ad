"""Which workers may take a sequence, and whose turn it is."""

import json

import pytest

from gpu_worker.migration.calls.targets import TargetPool
from octavo.request.errors import NotFound
from octavo.request.ids import Incarnation
from octavo.store.calls import Member
from octavo.store.memory import MemoryStore


async def pool(*members: Member) -> TargetPool:
    store = MemoryStore()
    await store.open()
    for member in members:
        await store.heartbeat(member, 60_000)
    return TargetPool(store, Incarnation("me"), "weights", "layout", worker_id="name")


def member(name: str, endpoint: object = "127.0.0.1:1", **changed: object) -> Member:
    info = {"worker_id": name, "endpoint": endpoint, "fingerprint": "weights", "layout": "layout", **changed}
    return Member("worker", Incarnation(name), json.dumps(info).encode(), name, str(endpoint))


async def test_every_worker_that_can_run_the_sequence_has_its_turn():
    others = [member("me"), member("d", draining=True), member("e", fingerprint="others"), member("f", layout="others")]
    unreadable = [Member("worker", Incarnation(name), info) for name, info in (("g", b"not JSON"), ("h", b"[]"))]
    targets = await pool(member("a"), member("b"), member("c"), *others, *unreadable)
    chosen = []
    for _ in range(6):
        candidates = await targets.candidates()
        assert len(candidates) == 3
        targets.note_choice(candidates[0])
        chosen.append(candidates[0].incarnation)
    assert chosen == ["a", "b", "c"] * 2
    assert await targets.count() == 3


async def test_what_a_worker_was_before_it_started_again_takes_nothing():
    """Its lease may not have ended yet."""
    targets = await pool(member("me"), member("past", worker_id="name"), member("a"))
    assert [each.incarnation for each in await targets.candidates()] == ["a"]
    assert await targets.count() == 1


async def test_sequences_move_within_a_class_alone_and_to_whoever_says_where_it_is_called():
    """Whoever else serves the model may compute them again, and so may one that says nothing of its model."""
    silent = Member("worker", Incarnation("e"), b"{}")
    targets = await pool(
        member("a", numerics="cpu/b"), member("b", numerics=""), member("c"), member("d", "no port"), silent
    )
    assert [each.incarnation for each in await targets.candidates()] == ["b", "c"]
    assert await targets.count() == 5


async def test_workers_for_prompts_come_last():
    targets = await pool(member("a", role="prefill"), member("b", role="decode"), member("c"), member("d", role=7))
    for _ in range(4):
        candidates = await targets.candidates()
        targets.note_choice(candidates[0])
        assert candidates[0].incarnation != "a"
        assert [each.incarnation for each in candidates][-1] == "a"


async def test_a_target_is_found_by_its_incarnation_alone():
    targets = await pool(member("a", "host-a:50061"), member("d", "[::1]:50062", draining=True), member("n", 7))
    assert str((await targets.find(Incarnation("a"))).endpoint) == "host-a:50061"
    assert (await targets.find(Incarnation("d"))).endpoint.host == "[::1]"  # it refuses by itself
    for nobody in ("host-a:50061", "n", ""):
        with pytest.raises(NotFound, match="no live worker"):
            await targets.find(Incarnation(nobody))
