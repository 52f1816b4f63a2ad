import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from worker_views import idle_view

from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from router.fleet.kv_index import HitCounts
from router.placing.placement import (
    ADAPTER_TOKENS,
    FILE_CREDIT,
    HOST_CREDIT,
    choose_worker,
    room_left,
)

BLOCK_SIZE = 16
IDLE = idle_view("a", incarnation="i-a")


def idle(worker_id, **changes):
    return idle_view(worker_id, incarnation="i-" + worker_id, **changes)


A_VIEW = st.builds(
    lambda available, **changes: dataclasses.replace(
        IDLE, available=available, reason_unavailable="" if available else "draining", **changes
    ),
    available=st.booleans(),
    queued_tokens=st.integers(0, 3) | st.integers(0, 10_000),
    num_running=st.integers(0, 70),
    num_waiting=st.integers(0, 20),
    dispatched_tokens=st.integers(0, 3000),
    num_dispatched=st.integers(0, 5),
    num_free_blocks=st.integers(0, 1000),
    num_cached_blocks=st.integers(0, 1000),
    context_tokens=st.sampled_from([512, 8192]),
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0, 190.0, 1000.0]),
    recent_picks=st.integers(0, 3),
)
SOME_VIEWS = st.lists(A_VIEW, max_size=6).map(
    lambda views: [
        dataclasses.replace(view, worker_id=name, incarnation=Incarnation("i-" + name))
        for view, name in zip(views, "dbface", strict=False)
    ]
)
Hits = dict[Incarnation, HitCounts]


@st.composite
def some_hits(draw, views, num_tokens):
    hits: Hits = {}
    for view in draw(st.lists(st.sampled_from(views), unique_by=lambda view: view.worker_id)) if views else ():
        device = draw(st.integers(0, num_tokens // BLOCK_SIZE))
        host = draw(st.integers(0, num_tokens // BLOCK_SIZE - device))
        files = draw(st.integers(0, num_tokens // BLOCK_SIZE - device - host))
        hits[view.incarnation] = HitCounts(device * BLOCK_SIZE, host * BLOCK_SIZE, files * BLOCK_SIZE)
    return hits


@given(SOME_VIEWS, st.integers(1, 9000), st.data())
def test_picks_the_first_of_its_own_ranking(views, num_tokens, data):
    hits = data.draw(some_hits(views, num_tokens))
    decision = choose_worker(num_tokens, hits, views)
    candidates = decision.candidates
    assert Counter(c.worker_id for c in candidates) == Counter(view.worker_id for view in views)
    eligible = [c for c in candidates if c.eligible]
    assert candidates[: len(eligible)] == eligible
    assert all(c.worker.available and num_tokens < c.worker.prompt_limit for c in eligible)
    assert all(c.reason for c in candidates[len(eligible) :])
    ranks = [(c.total_cost, c.recent_picks, c.worker_id) for c in eligible]
    assert ranks == sorted(ranks)
    assert decision.worker == (eligible[0].worker if eligible else None)
    for candidate in candidates:
        terms = (candidate.prefill_cost, candidate.load_cost, candidate.pressure_cost)
        assert candidate.total_cost == sum(terms) and min(terms) >= 0 and candidate.prefill_cost >= 1
    shuffled = data.draw(st.permutations(views))
    assert choose_worker(num_tokens, hits, shuffled).worker == decision.worker


def test_credits_the_host_pool_and_files_in_part():
    found = {"a": HitCounts(64, 32), "b": HitCounts(0, 96), "d": HitCounts(32, 16, 48)}
    hits = {Incarnation(f"i-{name}"): each for name, each in found.items()}
    candidates = choose_worker(100, hits, [idle(name) for name in "abcd"]).candidates
    costs = {c.worker_id: c.prefill_cost for c in candidates}
    credits_of_d = 32 + HOST_CREDIT * 16 + FILE_CREDIT * 48
    assert costs == {"a": 36 - HOST_CREDIT * 32, "b": 100 - HOST_CREDIT * 96, "c": 100, "d": 100 - credits_of_d}
    assert {c.worker_id: c.host_hit_tokens for c in candidates} == {"a": 32, "b": 96, "c": 0, "d": 64}


def test_prefers_a_prefix_before_a_short_queue():
    hits = {Incarnation("i-a"): HitCounts(960)}
    for queued, expected in ((0, "a"), (900, "a"), (1000, "b")):
        worker = choose_worker(1000, hits, [idle("a", queued_tokens=queued), idle("b")]).worker
        assert worker is not None and worker.worker_id == expected


def test_says_why_nobody_can_take_a_prompt():
    small = idle("b", num_blocks=10, num_free_blocks=10)
    decision = choose_worker(9000, {}, [idle("a"), small, idle("c", available=False, reason_unavailable="draining")])
    assert decision.worker is None
    reasons = {c.worker_id: c.reason for c in decision.candidates}
    assert "9000" in reasons["a"] and "8192" in reasons["a"] and reasons["c"] == "draining"
    assert "10 blocks" in {c.worker_id: c.reason for c in choose_worker(500, {}, [small]).candidates}["b"]


def test_sliding_models_take_prompts_beyond_their_blocks():
    sizes = {"num_blocks": 10, "num_free_blocks": 10, "num_cached_blocks": 0}
    assert choose_worker(500, {}, [idle("a", **sizes)]).worker is None
    sliding = idle("b", **sizes, max_sequence_blocks=10)
    assert choose_worker(500, {}, [idle("a", **sizes), sliding]).worker == sliding
    assert choose_worker(9000, {}, [sliding]).worker is None, "its context is what it was"
    assert choose_worker(500, {}, [idle("c", **sizes, max_sequence_blocks=11)]).worker is None
    (candidate,) = choose_worker(500, {}, [sliding]).candidates
    assert candidate.pressure_cost == 0, "ten blocks suffice, and ten are free"


@given(A_VIEW)
def test_room_shrinks_with_load(view):
    places, coming = room_left(view), view.num_waiting + view.num_dispatched
    assert places >= 0
    if places:
        assert view.available
        assert view.num_running + coming + places <= max(1, view.max_batch_sequences)
        given = dataclasses.replace(view, num_dispatched=view.num_dispatched + 1)
        assert room_left(given) < places  # so that a burst ends where the room does
    assert not room_left(dataclasses.replace(view, available=False))
    assert not room_left(dataclasses.replace(view, num_running=view.max_batch_sequences))


# Roles

A_ROLE = st.sampled_from(list(WorkerRole))


@given(SOME_VIEWS, st.integers(1, 9000), st.data(), st.sampled_from([WorkerRole.DECODE, WorkerRole.PREFILL]))
def test_roles_are_kept_and_refuse_no_sequence(views, num_tokens, data, avoided):
    hits = data.draw(some_hits(views, num_tokens))
    views = [dataclasses.replace(view, role=data.draw(A_ROLE)) for view in views]
    decision = choose_worker(num_tokens, hits, views, avoided=avoided)
    without_roles = choose_worker(num_tokens, hits, [dataclasses.replace(v, role=WorkerRole.BOTH) for v in views])
    assert (decision.worker is None) == (without_roles.worker is None)
    others = [view for view in views if view.role is not avoided]
    if decision.worker is not None:
        assert decision.candidates[0].worker == decision.worker
        could = [v for v in others if v.available and num_tokens < v.prompt_limit]
        assert (decision.worker.role is avoided) == (not could)
        assert all(not c.eligible for c in decision.candidates if could and c.worker.role is avoided)


@given(SOME_VIEWS, st.integers(1, 500))
def test_a_worker_that_has_the_adapter_is_cheaper_by_a_fixed_cost(views, num_tokens):
    with_it = [dataclasses.replace(view, adapters=frozenset({"d"})) for view in views]
    costs = [
        [(c.worker_id, c.load_cost, c.pressure_cost) for c in choose_worker(num_tokens, {}, each, lora=lora).candidates]
        for each, lora in ((views, ""), (with_it, "d"), (with_it, ""))
    ]
    assert costs[0] == costs[1] == costs[2]
    plain = {c.worker_id: c.prefill_cost for c in choose_worker(num_tokens, {}, views).candidates}
    for found in choose_worker(num_tokens, {}, views, lora="d").candidates:
        assert found.prefill_cost >= plain[found.worker_id] + ADAPTER_TOKENS
