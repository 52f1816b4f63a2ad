"""Drafts take only what a step has left."""

from collections import Counter
from dataclasses import replace

import pytest
from scheduler_bench import FAILURE, Bench

from gpu_worker.constraints.grammars import Grammars
from gpu_worker.drafting.drafts import LOOKUP, Drafts
from gpu_worker.drafting.row_costs import RowCosts
from gpu_worker.scheduling.freezer import Freezer
from gpu_worker.scheduling.planning.draft_planner import DEAR, FEW
from gpu_worker.scheduling.state.sequence import Branch
from octavo.request import hashing
from octavo.request.sampling import Constraint, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def bench(**config) -> Bench:
    """A bench whose branches have as many drafts as they may, all of them wrong."""
    made = Bench(**{"speculation": "lookup", "max_batch_tokens": 64, **config})
    wrong = 0  # no output has the end of a sequence
    made.scheduler._planner.drafts._look_up = lambda branch, most: Drafts([wrong] * most, LOOKUP)
    return made


def test_drafts_take_no_block_that_another_branch_may_need_and_leave_none_behind() -> None:
    made = bench(runner={"num_blocks": 4, "num_host_blocks": 0}, max_batch_sequences=16)
    for name in "ab":
        made.admit(name, 3, replace(LONG, max_tokens=5))
    while made.scheduler.has_work:
        made.step()
        for sequence in made.workload.sequences.values():
            assert len(sequence.branches[0].blocks) <= -(-(sequence.branches[0].num_computed + 1) // 4)
    assert not made.load().num_preempted_recompute
    assert made.workload.num_drafts["lookup"] > 0


@pytest.mark.parametrize(("share", "looks"), [(DEAR, True), (DEAR + 0.01, False)])
def test_where_a_row_must_nearly_always_be_right_nothing_is_looked_up(share: float, looks: bool, monkeypatch) -> None:
    made = bench()
    monkeypatch.setattr(RowCosts, "least_share", lambda costs, *rows: share)
    made.admit("a", 3, LONG)
    made.step()
    assert made.step()[0].num_drafted == looks


def test_a_suspect_has_no_drafts() -> None:
    made = bench()
    made.admit("a", 3, LONG)
    made.step()
    plan = made.scheduler.plan()
    assert plan.num_drafts
    made.scheduler.abort_step(plan, FAILURE)
    first, _, last = (made.step()[0].num_drafts for _ in range(3))
    assert first == 0 < last


def test_a_sequence_that_leaves_has_no_drafts_until_it_stays() -> None:
    made = bench()
    freezer = Freezer(made.workload)
    made.admit("a", 3, LONG)
    made.step()
    for leaves in (False, True, False):
        freezer.slow_down("a", 1, leaves=leaves)
        assert made.step()[0].num_drafted == (not leaves)
    freezer.slow_down("a", 2, leaves=True)  # another epoch
    freezer.slow_down("gone", 1, leaves=True)
    assert made.step()[0].num_drafted == 1


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_what_a_grammar_forces_is_guessed_whether_it_is_asked_or_foreseen(count: int) -> None:
    """A step more for all of it where it is foreseen: its first token is drawn before the others are guessed."""
    text = "a long text that nothing else may be"
    steps = {}
    for speculation in ("off", "forced"):
        made = Bench(runner={"num_blocks": 256}, speculation=speculation, max_batch_tokens=512, max_batch_sequences=256)
        grammar = Grammars(made.runner.info).compile(Constraint.choice([text]))
        for number in range(count):
            sequence = made.new(f"r{number}", 5, replace(LONG, ignore_eos=False))
            sequence.grammar = grammar
            assert made.scheduler.admit(sequence).admitted
        steps[speculation] = 0
        while made.scheduler.has_work:
            made.step()
            steps[speculation] += 1
        assert {bytes(tokens).rstrip(b"\0").decode() for tokens in made.tokens.values()} == {text}
        assert made.workload.num_drafts["forced"] == made.workload.num_accepted_drafts["forced"]
    assert steps["off"] == len(text) + 1 and steps["forced"] <= 6, steps


def test_outputs_guess_for_the_same_tenant_and_never_for_another() -> None:
    made = Bench(speculation="recent", max_batch_tokens=64)
    prompt = list(range(1, 9))
    guessed = []
    for name, salt in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("c1", "c")):
        before = made.workload.num_accepted_drafts["recent"]
        made.admit(name, prompt, LONG, root=hashing.root_key("model", "layout", salt=salt))
        made.finish()
        guessed.append(made.workload.num_accepted_drafts["recent"] - before)
    assert len({tuple(tokens) for tokens in made.tokens.values()}) == 1  # all of them have the same output
    assert guessed[0] == guessed[1] == guessed[4] == 0
    assert min(guessed[2:4]) > 40


def test_branches_get_as_many_rows_whether_their_drafts_are_right_or_wrong() -> None:
    """Room for six drafts a step, and four branches that want more than that each."""
    plain = Bench(max_batch_tokens=64, runner={"num_blocks": 200})
    made = bench(max_batch_sequences=10, runner={"num_blocks": 200})
    for each in (plain, made):
        for name in "abcd":
            each.admit(name, 5, replace(LONG, max_tokens=160))
    plain.finish()

    def guess(branch: Branch, most: int) -> Drafts:
        name = branch.sequence.seq_id
        right = plain.tokens[f"{name}.0"][branch.num_output :]
        return Drafts((right if name in "ab" else [0] * 9)[: min(most, 5 if name == "a" else 9)], LOOKUP)

    made.scheduler._planner.drafts._look_up = guess
    rows: Counter[str] = Counter()
    while made.scheduler.has_work:
        plan, _ = made.step()
        if plan.num_branches < 4:
            break
        rows.update({name: length - 1 for name, length in made.lengths.items()})
    assert made.tokens["a.0"] == plain.tokens["a.0"][: len(made.tokens["a.0"])]
    assert min(rows[name] for name in "abcd") > 50
    assert max(rows.values()) - min(rows.values()) <= 9


def test_the_end_of_a_branch_and_the_load_tell_what_became_of_its_drafts() -> None:
    made = Bench(speculation="recent", max_batch_tokens=64)
    for name in ("first", "again"):
        made.admit(name, [1, 2, 3, 4], LONG)
        ends = []
        while made.scheduler.has_work:
            ends += [item for item in made.step()[1].items if item.finish]
    load = made.load()
    assert [(ends[0].num_drafts, ends[0].num_accepted_drafts)] == [
        (sum(each.num_drafts for each in load.drafts), sum(each.num_accepted_drafts for each in load.drafts))
    ]
    assert ends[0].num_accepted_drafts > 40
    assert load.num_decodes + ends[0].num_accepted_drafts == 2 * (60 - 1)  # a prompt brings its first token itself
