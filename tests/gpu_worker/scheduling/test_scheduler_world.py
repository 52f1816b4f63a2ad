"""Random workloads on tiny memories: every output is the oracle's, everything ends, nothing leaks.

The world recounts blocks after every step, checks every item as it comes, and compares what the WitnessRunner reads
through block tables with what was written for it.
"""

import random
from collections import Counter

import pytest
from effort import draws
from scheduler_parts import SchedulerParts
from sequences import new_sequence
from stateful_witness import StatefulWitness

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Hold, Place
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from gpu_worker.testing.witness_runner import LAYERS, salt_of
from octavo.request.hashing import block_hashes
from octavo.request.ids import SequenceId
from octavo.request.sampling import FinishReason, SamplingParams


def sizes(seed: int) -> tuple[dict, dict]:
    rng = random.Random(seed)
    config = {
        "policy": rng.choice(["fcfs", "priority"]),
        "preemption": rng.choice(["auto", "swap", "recompute"]),
        "chunked_prefill": rng.random() < 0.8,
        "prefix_caching": rng.random() < 0.8,
        "watermark": rng.choice([0, 0.01, 0.1]),
        "max_batch_tokens": rng.choice([8, 16, 64]),
        "max_partial_prefills": rng.choice([1, 2, 4]),
        "min_preempt_interval_s": rng.choice([0, 2.0]),
    }
    runner = {"num_blocks": rng.choice([17, 20, 24, 60]), "num_host_blocks": rng.choice([0, 4, 16])}
    config["host_tier"] = rng.random() < 0.7
    return config, runner


def ran(world, num_operations: int = 250):
    """The world after so many operations, when all that was open has ended."""
    for _ in range(num_operations):
        world.operate()
    world.drain()
    return world


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(draws(8, 24)))
def test_chaos_changes_no_output(make_world, seed: int) -> None:
    ran(make_world(seed, *sizes(seed), eos=seed % 2 == 0, ending=seed % 3 == 0))


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(300, 300 + draws(12, 24)))
def test_chaos_with_drafts_changes_no_output(make_world, seed: int) -> None:
    """Decodes guess tokens, right ones and wrong ones, beside all else that may happen to a sequence."""
    config, runner = sizes(seed)
    rng = random.Random(-seed)
    runner |= {"window": rng.choice([0, 0, 9, 30]), "num_blocks": rng.choice([17, 24, 40, 60])}
    config |= {"max_batch_tokens": rng.choice([8, 16, 64])}
    moving, ending = seed % 3 == 0, seed % 3 == 1
    world = make_world(seed, config, runner, eos=seed % 2 == 0, moving=moving, ending=ending, guessing=True)
    assert ran(world).counts["drafts"]


def test_blocks_come_and_go_while_a_step_runs_that_has_made_copies(make_world) -> None:
    """The runner compares each block that it reads with what was written there."""
    sizes = {"num_blocks": 24, "num_host_blocks": 16}
    assert ran(make_world(9, {"min_preempt_interval_s": 0}, sizes, moving=True), 600).counts["after copies"] > 20


def test_every_place_and_hold_is_checked(make_world) -> None:
    """With SchedulerConfig.debug, each plan and commit compares them with the table of what excludes what."""
    left = {*Place, *Hold} - {Place.ABSENT, Hold.STARVED}
    for seed in (200, 201, 202, 203):
        if left:
            config, runner = {"min_preempt_interval_s": 0.0}, {"num_blocks": 20}
            left -= ran(make_world(seed, config, runner, moving=True, ending=True), 300).seen
    assert not left


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(100, 100 + draws(6, 18)))
def test_chaos_with_moves_changes_no_output(make_world, seed: int) -> None:
    """Sequences leave and come with their blocks; blocks are pinned, held, sealed, and released at any time."""
    config, runner = sizes(seed)
    window = random.Random(-seed).choice([0, 0, 9, 30])
    runner |= {"window": window, "num_blocks": random.Random(-seed).choice([17, 24, 40, 60])}
    config |= {"prefix_caching": seed % 8 > 0}
    ran(make_world(seed, config, runner, eos=seed % 2 == 0, moving=True), 300)


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(500, 500 + draws(4, 18)))
def test_states_in_blocks_are_those_of_their_tokens(make_world, seed: int) -> None:
    """A block of a model with recurrent layers has the state after its last token: it is no slot, and is not appended
    to, but goes from token to token."""
    ran(make_world(seed, *sizes(seed), eos=seed % 2 == 0, ending=seed % 3 == 0, kind=StatefulWitness))


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(24, 24 + draws(6, 18)))
def test_chaos_with_a_window_changes_no_output(make_world, seed: int) -> None:
    """Blocks are given back on the way, and memories may be smaller than the contexts that run in them."""
    config, runner = sizes(seed)
    rng = random.Random(-seed)
    window = rng.choice([1, 2, 4, 5, 7, 9, 13, 20])
    least = -(-window // 4) + 2  # what a branch needs, and a block for a fork
    runner |= {"window": window, "num_blocks": rng.choice([least, least + 1, 10, 12, 20])}
    ran(make_world(seed, config, runner, eos=seed % 2 == 0))


@pytest.mark.parametrize(
    ("seed", "config", "runner"),
    [
        # A branch that was taken over was swapped out before its first token, and lost the scores of repeated tokens.
        (35, {"prefix_caching": False, "watermark": 0.01}, {"num_blocks": 8}),
        # A forced step counted each of its chunks as one token.
        (387, {"watermark": 0, "max_batch_tokens": 8, "min_preempt_interval_s": 2.0}, {"num_blocks": 7}),
    ],
)
def test_what_chaos_once_found(make_world, seed: int, config: dict, runner: dict) -> None:
    usual = {"policy": "priority", "max_partial_prefills": 2, "min_preempt_interval_s": 0}
    ran(make_world(seed, usual | config, {"window": 20, **runner}, eos=False))


@pytest.mark.parametrize("seed", range(4))
def test_beams_end_at_their_stop_strings(make_world, seed: int) -> None:
    """The world's own beam search finds stop strings by looking at the whole text of every beam again."""
    world = make_world(seed, {"min_preempt_interval_s": 0.0}, {"num_blocks": 40, "num_host_blocks": 24}, eos=True)
    rng, requests = random.Random(seed), []
    for number in range(24):
        stop = rng.choice([("\x05", "\x11", "\x20"), ("\x07", "\x07\x05", "\x05\x07"), ("\x08\x09", "\x0a", "\x03")])
        params = SamplingParams(
            beam_width=rng.choice([2, 3, 4]),
            n=rng.choice([1, 2]),
            stop=stop,
            stop_token_ids=rng.choice([(), (6, 7)]),
            include_stop=rng.random() < 0.5,
            min_tokens=rng.choice([0, 0, 4]),
            max_tokens=rng.randint(2, 16),
            logprobs=rng.choice([None, 1]),
        )
        requests.append(world.submit(params, prompt=[1 + number % 3] * rng.randint(1, 20)))
        for _ in range(rng.randint(0, 4)):
            world.step()
        if number % 8 == 7:
            world.crash()
    world.drain()
    ends = [
        world.model.completes_stop(request.params, output)
        for request in requests
        for branch, output in enumerate(request.outputs)
        if request.finishes[branch] is FinishReason.STOP and output
    ]
    assert len(ends) > sum(ends) > 2, "some beams end by a stop string, and some by a stop token"


@pytest.mark.scaled
def test_many_steps_leave_nothing_behind() -> None:
    rng = random.Random(3)
    runner = FakeRunner(num_blocks=40, num_host_blocks=20, block_size=4, vocab_size=60, context_tokens=128)
    clock = [0.0]
    config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=12, min_preempt_interval_s=0.5)
    parts = SchedulerParts(config, runner.info, clock=lambda: clock[0])
    scheduler, sequences = parts.scheduler, parts.workload.sequences
    outputs: dict[SequenceId, list[int]] = {}
    expected: dict[SequenceId, list[int]] = {}
    number = 0
    for step in range(draws(3000, 20_000)):
        if rng.random() < 0.25 and parts.load().num_waiting < 20:
            number += 1
            name = SequenceId(str(number))
            prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 60))]
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=rng.randint(1, 40))
            assert scheduler.admit(new_sequence(name, prompt, params)).admitted
            outputs[name] = []
            if number % 50 == 0:
                expected[name] = fake_oracle(prompt, params.max_tokens, info=runner.info, params=params)
        if rng.random() < 0.01 and sequences:
            scheduler.cancel(rng.choice(list(sequences.values())))
        plan = scheduler.plan()
        clock[0] += 0.01
        for item in scheduler.commit(plan, runner.run(plan.input)).items:
            name = item.seq_id
            assert item.first_index == len(outputs[name])
            outputs[name] += item.token_ids
            if item.finish:
                output = outputs.pop(name)
                if name in expected:
                    assert output == expected[name][: len(output)]
                    assert item.finish == FinishReason.CANCELLED or len(output) == len(expected[name])
        if step % 500 == 0:
            scheduler.check_state()
    for sequence in list(sequences.values()):
        scheduler.drop(sequence)
    scheduler.check_state()
    load = parts.load()
    assert load.num_used_blocks == 0
    assert load.num_free_host_blocks == 20
    assert load.num_preempted_swap + load.num_preempted_recompute > draws(6, 50)
    assert number > draws(400, 3000)


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(draws(1, 4)))
def test_the_host_tier_saves_prefill_and_holds_what_it_says(make_world, seed: int) -> None:
    """Clients of prefixes that fill the device four times over. The world compares outputs with its oracle."""
    prefill = {}
    for host_tier in (True, False):
        config = {"host_tier": host_tier, "min_preempt_interval_s": 0.0, "preemption": "swap"}
        world = make_world(seed, config, {"num_blocks": 20, "num_host_blocks": 80}, eos=False)
        counts: Counter[str] = Counter()

        def run(plan, runner=world.runner, counts=counts):
            counts["prefill"] += plan.num_tokens - plan.num_decodes
            counts["demoted"] += len(plan.input.demotions)
            return runner.run(plan.input)

        world.output = run
        rng = random.Random(seed)
        prefixes = [[rng.randint(1, 30) for _ in range(24)] for _ in range(7)]
        for number in range(60):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=1 + number % 20, n=1 + number % 2)
            world.submit(params, prompt=[*rng.choice(prefixes), 1 + number % 30])
            for _ in range(rng.randint(1, 12)):
                world.step(fail=rng.random() < 0.01)
            if number % 10 == 9:
                compare_demoted_blocks(world)
        world.drain()
        compare_demoted_blocks(world)
        assert bool(counts["demoted"]) == host_tier
        assert world.parts.load().num_preempted_swap > 0
        prefill[host_tier] = counts["prefill"]
    assert prefill[True] < 0.75 * prefill[False]


def compare_demoted_blocks(world) -> None:
    """Every demoted block holds the tokens of its hash, at their positions, of the root that it was computed for."""
    size, known = world.runner.info.block_size, {}
    for request in world.requests.values():
        for output in request.outputs:
            tokens = request.prompt + output
            for index, block_hash in enumerate(block_hashes(request.root, tokens, size)):
                known[block_hash] = (request.root, tokens[index * size : (index + 1) * size], index * size)
    for block_hash, host in world.parts.workload.tables.cache.on_host.items():
        root, tokens, start = known[block_hash]
        for slot, token in zip(world.runner._host[host].tolist(), tokens, strict=True):
            position = start
            start += 1
            assert slot == [[token | position << 32, salt_of(root) ^ layer] for layer in LAYERS]
