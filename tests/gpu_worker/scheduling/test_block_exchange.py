"""Sequences move between two schedulers with their blocks: same tokens, and only their tails are computed again."""

from dataclasses import replace

import pytest
from migration_benches import KINDS, MigrationBench, copy_blocks, hashes_of, move
from scheduler_bench import FAILURE, GREEDY

from gpu_worker.scheduling.block_exchange import tail_name
from gpu_worker.scheduling.state.sequence import CarriedScores, CarriedTail, Hold, Place
from octavo.request.errors import CannotMove, OutOfBlocks
from octavo.request.hashing import block_hashes
from octavo.request.ids import BlockHash, SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams, TokenScore

LONG = replace(GREEDY, max_tokens=40)


def undisturbed(name: str, prompt: int, params: SamplingParams) -> MigrationBench:
    bench = MigrationBench()
    bench.admit(name, prompt, params)
    bench.finish()
    return bench


def is_empty(bench: MigrationBench) -> bool:
    return not bench.load().num_used_blocks


@pytest.mark.parametrize("with_tails", [True, False])
@pytest.mark.parametrize("num_steps", [3, 4, 5, 6, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_moves_and_nobody_notices(kind: str, num_steps: int, with_tails: bool) -> None:
    """However full its last block is. Where that does not travel, its tokens are computed again by each branch."""
    params, source, target = KINDS[kind], MigrationBench(), MigrationBench()
    source.admit("a", 37, params)
    source.run_steps(num_steps)
    target.admit("b", 9, LONG)
    target.step()
    between = [lambda: source.run_steps(2), lambda: source.run_steps(3)]
    move(source, target, "a", between, with_tails=with_tails)
    assert is_empty(source)
    num_branches = params.num_branches
    num_in_tail = (37 + len(source.tokens["a.0"]) - 1) % 4
    plan, result = target.step()
    assert len(plan.chunks) == num_branches + 1, "it runs in the next step"
    assert plan.num_tokens == 1 + num_branches * (1 if with_tails else 1 + num_in_tail) and not plan.input.copies
    assert all(len(item.token_ids) == 1 and item.cached_tokens is None for item in result.items), "no token comes again"
    target.finish()
    whole = undisturbed("a", 37, params)
    for key in whole.tokens:
        assert source.tokens[key] + target.tokens[key] == whole.tokens[key]
        assert source.scores[key] + target.scores[key] == whole.scores[key]
        assert target.totals[key] == pytest.approx(whole.totals[key])
    assert not target.runner.mismatches, target.runner.first_mismatch
    assert is_empty(target)


@pytest.mark.parametrize("num_computed", [0, 20, 24, 25])
def test_a_tail_that_does_not_fit_its_branch_is_computed(num_computed: int) -> None:
    """Of 24 tokens, 20 are in full blocks, and 23 are computed."""
    source, target = MigrationBench(), MigrationBench()
    sequence = source.admit("a", 21, LONG)
    source.run_steps(3)
    held = target.exchange.hold(hashes_of(sequence, 4), with_tails=True)
    copy_blocks(source, target, held)
    moved = target.new("a", sequence.prompt, LONG, epoch=2, outputs=[source.tokens["a.0"]])
    (tail,) = held.tails.values()
    moved.carried = CarriedScores((0.0,), tails={0: CarriedTail(tail, num_computed)})
    assert target.scheduler.admit(moved).admitted
    assert not tail.blocks, "given back"
    plan, _ = target.step()
    assert plan.num_tokens == 4
    target.exchange.release(held)
    target.finish()
    assert source.tokens["a.0"] + target.tokens["a.0"] == undisturbed("a", 21, LONG).tokens["a.0"]
    assert is_empty(target)


def test_a_pinned_tail_is_not_written_by_a_branch_that_runs_on() -> None:
    bench = MigrationBench()
    sequence = bench.admit("a", 21, LONG)
    bench.run_steps(3)
    bench.freezer.freeze(sequence.seq_id, 1)
    pinned = bench.exchange.pin_tails(sequence)
    (block,) = pinned.blocks.values()
    assert block == sequence.branches[0].blocks[5] and list(pinned.blocks) == [tail_name(0)]
    before = bench.runner._arena[block].copy()
    bench.freezer.thaw(sequence.seq_id, 1)
    bench.finish()
    assert (bench.runner._arena[block] == before).all()
    bench.exchange.unpin(pinned)
    bench.scheduler.check_state()
    assert is_empty(bench)
    assert bench.tokens == undisturbed("a", 21, LONG).tokens


def test_an_import_takes_all_blocks_or_none_and_leaves_what_others_need() -> None:
    bench = MigrationBench(sizes={"num_blocks": 20}, watermark=0.2)
    hashes = [BlockHash(bytes([index] * 16)) for index in range(20)]
    with pytest.raises(OutOfBlocks, match="16 blocks needed, and 5 for what runs here; 20 are available"):
        bench.exchange.hold([hashes[:16]])
    assert is_empty(bench)
    held = bench.exchange.hold([hashes[:10]])
    with pytest.raises(OutOfBlocks):
        bench.exchange.extend(held, [hashes[:16]])
    assert (held.num_blocks, len(held.wanted), bench.load().num_used_blocks) == (10, 10, 10)
    assert [wanted.index for wanted in bench.exchange.extend(held, [hashes[:12]])] == [10, 11]
    bench.scheduler.check_state()
    for _ in range(2):
        bench.exchange.release(held)
    bench.scheduler.check_state()
    assert is_empty(bench) and bench.load().num_free_blocks == 20, "nothing that has not arrived is known"
    with pytest.raises(CannotMove, match="has ended"):
        bench.exchange.extend(held, [hashes])


def test_a_moved_sequence_overtakes_prompts_that_wait() -> None:
    source, target = MigrationBench(), MigrationBench(sizes={"num_blocks": 30})
    source.admit("a", 21, LONG)
    source.run_steps(3)
    target.admit("runs", 30, LONG)
    target.step()
    target.admit("waits", 100, LONG)
    target.step()
    assert target.load().num_waiting == 1
    move(source, target, "a")
    target.step()
    assert "a" in target.lengths and target.load().num_waiting == 1


@pytest.mark.parametrize("lost", ["rows", "room", "queue", "blocks", "scores", "turn", "company"])
def test_one_that_cannot_start_at_once_waits_in_its_turn(lost: str) -> None:
    """Its tokens are the same. Without its scores, all its tokens are told again with their scores.

    A full queue does not keep it out: the store has made this worker the owner, and nobody else runs it.
    """
    params = replace(KINDS["logprobs"], max_tokens=12)
    whole = undisturbed("a", 21, params)
    source = MigrationBench()
    target = MigrationBench(max_batch_sequences=2, max_waiting=1, sizes={"num_blocks": 20})
    sequence = source.admit("a", 21, params)
    source.run_steps(3)
    held = target.exchange.hold(hashes_of(sequence, 4))
    if lost != "blocks":
        copy_blocks(source, target, held)
    fields = {"epoch": 2, "outputs": [source.tokens["a.0"]], "suspect": lost == "company"}
    moved = target.new("a", sequence.prompt, params, **fields)
    moved.carried = None if lost == "scores" else CarriedScores((0.0,), (tuple(source.scores["a.0"]),))
    others = {"rows": [5, 5], "room": [57], "turn": [5], "queue": [5, 5, 5]}.get(lost, [])
    for name, prompt in zip("xyz", others, strict=False):
        target.admit(name, prompt, replace(GREEDY, max_tokens=5))
        target.run_steps(1 + prompt // 32)
    assert target.load().num_waiting == (lost == "queue")
    if lost == "turn":  # one that runs alone waits for room
        target.scheduler.abort_step(target.scheduler.plan(), FAILURE)
        target.workload.hold(target.sequence("x"), Hold.STARVED)
    assert target.scheduler.admit(moved).admitted
    assert moved.place is Place.WAITING
    target.exchange.release(held)
    if lost == "company":
        assert target.scheduler.reserve_steps(moved) and target.scheduler.begin_trial(moved)
    target.finish()
    told = target.tokens["a.0"] if lost == "scores" else source.tokens["a.0"] + target.tokens["a.0"]
    assert told == whole.tokens["a.0"]
    assert lost != "scores" or target.scores["a.0"] == whole.scores["a.0"]


def test_scores_fit_the_tokens_they_belong_to() -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=5, logprobs=0)
    fields = {"seq_id": SequenceId("a"), "epoch": 2, "outputs": [[7], [8]], "finished_branches": [1]}
    score, totals = TokenScore(7, -0.5), (0.0, 0.0)
    plain, scored = replace(params, logprobs=None), replace(params, prompt_logprobs=0)
    for fits, sampling, prompt, carried in [
        (True, params, [1], CarriedScores(totals, ((score,), ()))),
        (False, params, [1], CarriedScores((0.0,), ((score,), ()))),
        (False, params, [1], CarriedScores(totals, ((score, score), ()))),
        (False, params, [1], CarriedScores(totals)),
        (True, plain, [1], CarriedScores(totals)),
        (False, scored, [1, 7], CarriedScores(totals, ((score,), ()))),
        (True, scored, [1, 7], CarriedScores(totals, ((score,), ()), prompt_scores=(score,))),
        (False, scored, [1, 8], CarriedScores(totals, ((score,), ()), prompt_scores=(score,))),
    ]:
        assert carried.fit(Admission(**fields, prompt=prompt, sampling=sampling)) is fits


def test_blocks_behind_a_known_prefix_are_lacking() -> None:
    bench = MigrationBench()
    bench.admit("a", list(range(1, 10)))
    bench.finish()
    root = bench.new("x").root
    known, other = block_hashes(root, range(1, 9), 4), block_hashes(root, [*range(1, 5), *range(50, 58)], 4)
    assert bench.exchange.num_lacking(known) == 0
    assert bench.exchange.num_lacking(other) == 2
    assert bench.exchange.num_lacking([*other[1:], *known]) == 4, "what stands behind a gap does not count"
    assert bench.exchange.num_lacking([]) == 0
