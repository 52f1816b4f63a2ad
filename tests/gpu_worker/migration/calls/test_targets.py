"""Which workers may take a sequence, and whose turn it is."""

import json

import pytest

from gpu_worker.migration.calls.targets import TargetPool, describe_worker, takes_over
from octavo.request.errors import NotFound
from octavo.request.ids import Incarnation
from octavo.store.calls import Member
from octavo.store.memory import MemoryStore


def described(**changed: object) -> Member:
    info = json.loads(describe_worker({"worker_id": "w"}, "weights", "layout", draining=False))
    return Member("worker", Incarnation("w"), json.dumps({**info, **changed}).encode())


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (described(), True),
        (described(draining=True), False),
        (described(fingerprint="others"), False),
        (described(layout="others"), False),
        (Member("worker", Incarnation("w"), b'{"worker_id": "w"}'), True),
        (Member("worker", Incarnation("w"), b"not JSON"), False),
        (Member("worker", Incarnation("w"), b"[]"), False),
    ],
)
def test_who_takes_over(member, expected):
    assert takes_over(member, "weights", "layout") is expected


async def pool(*members: Member) -> TargetPool:
    store = MemoryStore()
    await store.open()
    for member in members:
        await store.heartbeat(member, 60_000)
    return TargetPool(store, Incarnation("me"), "weights", "layout")


def member(name: str, endpoint: object = "127.0.0.1:1", **changed: object) -> Member:
    info = {"worker_id": name, "endpoint": endpoint, "fingerprint": "weights", "layout": "layout", **changed}
    return Member("worker", Incarnation(name), json.dumps(info).encode(), name, str(endpoint))


async def test_every_worker_has_its_turn():
    targets = await pool(member("a"), member("b"), member("c"), member("me"), member("d", draining=True))
    chosen = []
    for _ in range(6):
        candidates = await targets.candidates()
        assert len(candidates) == 3
        targets.note_choice(candidates[0])
        chosen.append(candidates[0].incarnation)
    assert chosen == ["a", "b", "c"] * 2
    assert await targets.count() == 3


async def test_sequences_move_within_a_class_alone():
    """Whoever else serves the model may compute them again."""
    targets = await pool(member("a", numerics="cpu/b"), member("b", numerics=""), member("c"))
    assert [each.incarnation for each in await targets.candidates()] == ["b", "c"]
    assert await targets.count() == 3


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


async def test_whoever_does_not_say_where_it_is_called_is_no_target():
    targets = await pool(member("a", "no port"), Member("worker", Incarnation("b"), b"{}"))
    assert await targets.candidates() == []
