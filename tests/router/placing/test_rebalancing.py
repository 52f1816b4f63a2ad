import dataclasses
from itertools import pairwise
from math import inf

import pytest
from fleet_model import FleetModel
from hypothesis import given
from hypothesis import strategies as st
from worker_views import idle_view

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_view import SequenceView, WorkerSnapshot
from router.placing.rebalancing import (
    AT_ONCE,
    MIN_EXPECTED_TOKENS,
    MOVES_IN_RETURN_S,
    REST_S,
    RETURN_S,
    MigrationHistory,
    PastMigration,
    ProposedMigration,
    load_of,
    plan_migrations,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 1000
NOW = 1000.0
A, B, C = Incarnation("a"), Incarnation("b"), Incarnation("c")


def sequence(name, num_blocks=10, **changes):
    view = SequenceView(
        seq_id=SequenceId(name),
        num_tokens=num_blocks * BLOCK_SIZE,
        expected_tokens=500,
        num_blocks=num_blocks,
        num_own_blocks=num_blocks,
    )
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]


def worker(name, sequences=(), **changes):
    """A worker whose view says what its sequences say. What is no field of a snapshot changes its view."""
    fields = {field.name for field in dataclasses.fields(WorkerSnapshot)}
    of_view = {key: value for key, value in changes.items() if key not in fields}
    usual = {
        "num_running": sum(s.num_branches for s in sequences),
        "num_free_blocks": NUM_BLOCKS - sum(s.num_own_blocks for s in sequences),
        "context_tokens": 16384,
    }
    view = idle_view(name, **{**usual, **of_view})
    snapshot = WorkerSnapshot(
        view=view,
        model="m",
        layout="l",
        sequences=sequences,
    )
    return dataclasses.replace(snapshot, **{k: v for k, v in changes.items() if k in fields})  # type: ignore[arg-type]


# ---- what always holds ---------------------------------------------------------------------------------------------

A_SEQUENCE = st.builds(
    lambda num_blocks, shared, **changes: sequence(
        "", num_blocks, num_own_blocks=max(0, num_blocks - shared), **changes
    ),
    num_blocks=st.integers(1, 120),
    shared=st.sampled_from([0, 0, 8]),
    expected_tokens=st.sampled_from([3, 31, 32, 400, 4000]),
    num_branches=st.sampled_from([1, 1, 1, 4]),
    is_prefilled=st.sampled_from([True, True, True, False]),
    has_beams=st.sampled_from([False, False, False, True]),
    is_suspect=st.sampled_from([False, False, False, True]),
    last_moved_at=st.sampled_from([0.0, 0.0, NOW - 5]),
)
USUALLY_FALSE = st.sampled_from([False, False, False, False, True])


@st.composite
def some_fleet(draw):
    workers = []
    for name in "abcde"[: draw(st.integers(1, 5))]:
        drawn = draw(st.lists(A_SEQUENCE, max_size=draw(st.sampled_from([2, 25]))))
        sequences = [dataclasses.replace(s, seq_id=SequenceId(f"{name}{n}")) for n, s in enumerate(drawn)]
        draining = draw(USUALLY_FALSE)
        used = sum(s.num_own_blocks for s in sequences)
        workers.append(
            worker(
                name,
                sequences,
                available=not draining and not draw(USUALLY_FALSE),
                draining=draining,
                alive=not draw(USUALLY_FALSE),
                model=draw(st.sampled_from(["m", "m", "m", "other"])),
                num_blocks=max(used, 1) + (free := draw(st.sampled_from([0, 100, 3000]))),
                num_free_blocks=max(used, 1) + free - used,
                max_batch_sequences=draw(st.sampled_from([16, 64])),
                prefill_tokens_per_s=draw(st.sampled_from([0.0, 100.0, 1000.0])),
            )
        )
    return workers


@st.composite
def some_past(draw, fleet):
    ids = [w.view.incarnation for w in fleet]
    names = [s.seq_id for w in fleet for s in w.sequences] or [SequenceId("gone")]
    migration = st.builds(
        PastMigration,
        st.sampled_from(names),
        st.sampled_from(ids),
        st.sampled_from(ids),
        st.sampled_from([NOW - 1, NOW - 30, NOW - 90]),
        st.booleans(),
    )
    return draw(st.lists(migration, max_size=6))


@given(some_fleet(), st.data())
def test_what_holds_for_every_plan(fleet, data):
    past = data.draw(some_past(fleet))
    proposed = plan_migrations(fleet, past, NOW)
    by_id = {w.view.incarnation: w for w in fleet}
    moving = {m.seq_id for m in past if m.under_way}
    assert len({m.seq_id for m in proposed}) == len(proposed)
    for migration in proposed:
        source, target = by_id[migration.source], by_id[migration.target]
        (moved,) = [s for s in source.sequences if s.seq_id == migration.seq_id]
        assert source is not target and source.alive and target.alive and target.view.available
        assert not target.draining
        assert (source.model, source.layout) == (target.model, target.layout)
        assert moved.can_move and moved.expected_tokens >= MIN_EXPECTED_TOKENS and moved.seq_id not in moving
        assert NOW - moved.last_moved_at >= REST_S and not source.draining
        pair = {migration.source, migration.target}
        assert not any({m.source, m.target} == pair and NOW - m.at < REST_S for m in past)
        own = [m for m in past if m.seq_id == moved.seq_id]
        assert not any(m.source == migration.target and NOW - m.at < RETURN_S for m in own)
        assert sum(NOW - m.at < RETURN_S for m in own) < MOVES_IN_RETURN_S and all(NOW - m.at >= REST_S for m in own)
    assert len({frozenset((m.source, m.target)) for m in proposed}) == len(proposed)
    assert len(proposed) <= max(0, AT_ONCE - sum(m.under_way for m in past))
    assert plan_migrations(data.draw(st.permutations(fleet)), past, NOW) == proposed


def test_a_sequence_rests_and_does_not_return():
    moved = PastMigration(SequenceId("s"), A, B, 100.0)
    for now, may_move, returns in ((105.0, False, True), (111.0, True, True), (100.0 + RETURN_S, True, False)):
        history = MigrationHistory([moved], now)
        assert history.may_move(sequence("s")) == may_move and history.returns(sequence("s"), A) == returns
        assert history.rests(B, A) == (now < 100.0 + REST_S) and not history.returns(sequence("s"), C)


def after(fleet, migration):
    """The fleet when that migration is done."""
    (moved,) = [s for w in fleet for s in w.sequences if s.seq_id == migration.seq_id]
    found = []
    for one in fleet:
        view, branches = one.view, moved.num_branches
        if view.incarnation == migration.source:
            free = view.num_free_blocks + moved.num_own_blocks
            view = dataclasses.replace(view, num_running=view.num_running - branches, num_free_blocks=free)
            one = dataclasses.replace(one, view=view, sequences=[s for s in one.sequences if s is not moved])
        elif view.incarnation == migration.target:
            free = view.num_free_blocks - moved.num_blocks
            view = dataclasses.replace(view, num_running=view.num_running + branches, num_free_blocks=free)
            one = dataclasses.replace(one, view=view, sequences=[*one.sequences, moved])
        found.append(one)
    return found


def loads(fleet):
    fastest = max((w.view.prefill_tokens_per_s for w in fleet if w.alive and w.view.available), default=0.0)
    return {w.view.incarnation: load_of(w.view, fastest / 2) for w in fleet}


@given(some_fleet())
def test_no_target_ends_busier_than_its_source(fleet):
    one_model = [dataclasses.replace(w, model="m") for w in fleet]
    state = one_model
    for migration in plan_migrations(one_model, [], NOW):
        state = after(state, migration)
        assert loads(state)[migration.target] <= loads(state)[migration.source] + 1e-6


@given(some_fleet())
def test_an_undisturbed_fleet_comes_to_rest(fleet):
    """Without any memory of the past: the band alone must keep two workers from sending sequences to and fro."""
    quiet = [dataclasses.replace(w, draining=False) for w in fleet]
    num_sequences = sum(len(w.sequences) for w in quiet)
    for _ in range(2 * num_sequences + 2):
        proposed = plan_migrations(quiet, [], NOW)
        if not proposed:
            return
        for migration in proposed:
            quiet = after(quiet, migration)
    pytest.fail("still moving")


# ---- a modelled fleet ----------------------------------------------------------------------------------------------


def check_moves(figures):
    """No sequence returns within a minute or moves twice in ten seconds, and no pair of workers does."""
    assert figures.began
    last: dict[frozenset[Incarnation], float] = {}
    by_sequence: dict[SequenceId, list[tuple[float, ProposedMigration]]] = {}
    for at, migration in figures.began:
        pair = frozenset((migration.source, migration.target))
        assert at - last.get(pair, -inf) >= REST_S - 1e-6
        last[pair] = at
        by_sequence.setdefault(migration.seq_id, []).append((at, migration))
    for moves in by_sequence.values():
        for (earlier, before), (later, after) in pairwise(moves):
            assert later - earlier >= REST_S - 1e-6
            assert later - earlier >= RETURN_S or after.target != before.source
        assert len(moves) <= 6
    assert sum(len(moves) > 2 for moves in by_sequence.values()) <= 0.02 * len(by_sequence)


def high_ratio(figures):
    return figures.percentile(figures.ratios, 0.99)


@pytest.mark.parametrize(
    ("num_workers", "rate", "seed", "seconds"),
    [
        pytest.param(8, 6, 1, 600, marks=pytest.mark.slow),
        *[
            pytest.param(*each, 3600, marks=[pytest.mark.long, pytest.mark.timeout(600)])
            for each in ((8, 6, 1), (8, 8, 2), (4, 3, 3))
        ],
    ],
)
def test_evens_the_load_of_a_modelled_fleet(num_workers, rate, seed, seconds):
    """Few prefixes are popular, so placement gives some workers more; few outputs are long."""
    with_it = FleetModel(num_workers, plan_migrations, seed, rate).run(seconds)
    without = FleetModel(num_workers, None, seed, rate).run(seconds)
    assert high_ratio(with_it) <= 1.3 < high_ratio(without)
    check_moves(with_it)
    if seconds > 600:
        assert len(with_it.began) < 0.05 * with_it.num_accepted
        assert with_it.percentile(with_it.slowest_steps_ms, 0.99) < without.percentile(without.slowest_steps_ms, 0.99)
