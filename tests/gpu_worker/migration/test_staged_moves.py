"""Sequences and prefixes move between workers whose blocks travel by way of staging areas, as those of GPUs do.

The copies are made as late as can be, and the buffers are spoilt before. So the slots of a block that is read or used
too early are not those that the WitnessRunner expects.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from connected_bench import ConnectedBench
from late_copier import StagedWitness, check_buffers
from tiny_llama import PROMPTS, Form, tiny_llama
from worker_pair import (
    MOVED,
    PATIENCE_S,
    STAYED,
    CountingRunner,
    Follower,
    PairedWorker,
    WorkerPair,
    greedy,
    set_pace,
    worker_pair,
)

from gpu_worker.ops.reference import ReferenceOps
from gpu_worker.running.memory.staged_blocks import StagingSize
from octavo.request.sampling import SamplingParams


class CountingWitness(StagedWitness, CountingRunner):
    """Blocks by way of a staging area, and a count of the tokens of prompts that are computed."""


@pytest.fixture(params=[StagingSize(8, 3), StagingSize(1, 1)], ids=["buffers", "a buffer"])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPair]:
    monkeypatch.setattr(PairedWorker, "runner_kind", CountingWitness)
    monkeypatch.setattr(CountingWitness, "size", request.param)
    async with worker_pair() as made:
        yield made
        for worker in (made.a, made.b):  # nothing is left: no pin, no ticket, no buffer, no copy
            await worker.has_no_pins()
            worker.runner.check_buffers()


async def move(source: PairedWorker, follower: Follower, target: PairedWorker, epoch: int = 1) -> None:
    """On a busy machine it may take more than one attempt."""
    async with asyncio.timeout(PATIENCE_S):
        while (last := await source.migrate(follower.seq_id, epoch, target=target.incarnation)).outcome != MOVED:
            assert last.outcome == STAYED
    assert last.epoch == epoch + 1


async def test_sequences_cross_and_come_back_also_after_copies_that_are_not_begun(pair: WorkerPair) -> None:
    """Both workers read and write at once."""
    seeded = [greedy(600, temperature=0.9, seed=seed) for seed in (1, 2)]
    params = [greedy(600), *seeded, greedy(400, temperature=0.9, n=2, best_of=3, seed=5)]
    prompts = [tuple(range(1 + 50 * number, 60 + 50 * number)) for number in range(4)]
    workers = [pair.a, pair.b] * 2
    followers = [
        await pair.run(param, prompt=prompt, on=worker)
        for param, prompt, worker in zip(params, prompts, workers, strict=True)
    ]
    set_pace(pair.a, pair.b, slow=True)
    for broken in (pair.a, pair.b):
        broken.runner.copier.fail_begin = True
        assert (await pair.a.migrate(followers[0].seq_id, target=pair.b.incarnation)).outcome == STAYED
        broken.runner.copier.fail_begin = False
    before = [worker.runner.num_prefill for worker in (pair.a, pair.b)]
    for epoch in (1, 2):
        targets = workers[1:] + workers[:1]
        pairs = zip(workers, followers, targets, strict=True)
        await asyncio.gather(*(move(worker, each, target, epoch) for worker, each, target in pairs))
        workers = targets
    set_pace(pair.a, pair.b, slow=False)
    for follower, param, prompt in zip(followers, params, prompts, strict=True):
        await pair.check_end(follower, param, prompt=prompt)
    assert before == [worker.runner.num_prefill for worker in (pair.a, pair.b)], "blocks were computed again"
    assert pair.a.runner.copier.num_copies and pair.b.runner.copier.num_copies


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["stopped", "goes on"])
def test_sequences_of_a_real_model_move_away_and_back(staged: bool, goes_on: bool) -> None:
    """As `make gpu-check` does it on a GPU. Freed blocks are filled with NaN."""
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    alone, *sides = (
        ConnectedBench(runner=tiny_llama(Form(), ReferenceOps(), staged=staged).runner, goes_on=goes_on)
        for _ in range(3)
    )
    for name, prompt in zip(("s0", "s1"), PROMPTS, strict=False):
        alone.admit(name, prompt, params)
        sides[0].admit(name, prompt, params)
    alone.finish()
    sides[1].admit("other", list(range(1, 30)), params)
    for side in sides:
        side.run_steps(12)
    for source, target in (sides, sides[::-1]):
        source.move_to(target, "s0", between=[source.step])
        target.step()
        assert target.lengths["s0"] == 1, "it was computed again"
    for side in sides:
        side.finish()
        side.close()
        assert side.num_sent and side.num_steps_meanwhile <= goes_on * side.num_sent * 32
        if staged:
            check_buffers(side.runner.block_memory, StagingSize.of(side.runner.info.bytes_per_block))
    assert {name: sides[0].tokens[name] for name in alone.tokens} == alone.tokens
