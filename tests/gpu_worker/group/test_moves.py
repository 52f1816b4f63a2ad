"""What goes from one group to another of a different size, in whole workers: the tokens stay those of one process.

The model is a mixture in a GGUF file. Ranks 1, 2 and so on are processes; all that is theirs is shared memory.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from effort import some
from gguf_converter import convert
from guard.processes import lasting
from model_workers import ModelWorkers, model_workers
from waiting import until
from worker_pair import SLOW_S, Follower, greedy

from gpu_worker.group.loading import load_group
from gpu_worker.migration.standby import standby_owner
from gpu_worker.running.loading import load_runner
from gpu_worker.steps.runner import Runner
from octavo.internal.v1 import worker_pb2
from octavo.store.calls import TakeReason, TakeRequest
from octavo.wire.internal import admission_to_wire

from .conftest import SIZES, forking_ranks, gone

pytestmark = pytest.mark.timeout(300)  # ranks import torch, and others may need the cores
SIZE = 8
SETTINGS = {"block_size": SIZE, "max_batch_tokens": 96, "max_batch_sequences": 16}
PROMPT = tuple((i * 7 + 3) % 250 for i in range(101))
SHORT, LONG = greedy(24), greedy(260, temperature=0.8, n=2, best_of=2, seed=5)
NUM_BLOCKS = 160
MOVED = worker_pb2.MIGRATION_OUTCOME_MOVED


@dataclass(frozen=True, slots=True)
class Sizes:
    """Runners of one, two and four ranks, and another one of one rank."""

    one: Runner
    two: Runner
    four: Runner
    last: Runner


@pytest.fixture(scope="module")
def runners(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sizes]:
    file = tmp_path_factory.mktemp("gguf") / "mixture.gguf"
    convert(folders("Qwen2Moe"), file, kind=gguf.GGMLQuantizationType.Q8_0)
    given = {**SIZES, "block_size": SIZE, "swap_bytes": 0, "kv_cache_bytes": 1 << 24}
    block_bytes = load_runner(str(file), **given).info.bytes_per_block
    given |= {"kv_cache_bytes": NUM_BLOCKS * block_bytes, "swap_bytes": NUM_BLOCKS * block_bytes}
    pids: list[int] = []
    with ExitStack() as stack, lasting(lambda: pids), forking_ranks():

        def start(ranks: int, stages: int) -> Runner:
            runner = load_group(str(file), ranks=ranks, stages=stages, patience_s=60.0, **given)
            pids.extend(runner.rank_pids)
            stack.callback(lambda pids: gone(pids), runner.rank_pids)
            stack.callback(runner.close)
            return runner

        yield Sizes(load_runner(str(file), **given), start(2, 1), start(2, 2), load_runner(str(file), **given))


async def move(workers: ModelWorkers, follower: Follower, hops: list[str]) -> None:
    """From each worker, by name, to the next one."""
    named = {each._settings.worker_id: each for each in workers.workers.values()}
    for epoch, (name, to) in enumerate(pairwise(hops), 1):
        target = named[to].incarnation
        moved = await named[name].migrate(follower.seq_id, epoch, target)
        assert (moved.outcome, moved.epoch) == (MOVED, epoch + 1)
        assert moved.num_blocks >= len(PROMPT) // SIZE
        await until(lambda target=target: follower.owners[-1] == target)
        has = max(map(len, follower.outputs()))
        await until(lambda has=has: max(map(len, follower.outputs())) > has + 2, 60)


async def test_a_sequence_moves_through_groups_of_all_sizes(runners: Sizes) -> None:
    async with model_workers(runners.one, runners.two, **SETTINGS) as workers:
        expected, _ = await workers.say(workers.a, PROMPT, LONG)
        await workers.join("four", runners.four)
        await workers.join("last", runners.last)
        for each in workers.workers.values():
            each.runner.step_s = SLOW_S
        follower = await workers.run(LONG, prompt=PROMPT)
        await move(workers, follower, ["a", "b", "four", "last", "four", "a"])
        for each in workers.workers.values():
            each.runner.step_s = 0.0
        assert await workers.outputs(follower) == expected
        await workers.has_let_go()


async def test_a_prefix_is_fetched_from_a_group_of_another_size(runners: Sizes) -> None:
    num_full = len(PROMPT) // SIZE * SIZE
    async with model_workers(runners.one, runners.four, **SETTINGS) as workers:
        two, last = await workers.join("two", runners.two), await workers.join("last", runners.last)
        expected, cached = await workers.say(workers.a, PROMPT, SHORT)
        assert not cached
        owner = workers.a
        for asker in (workers.b, two, last):
            found, cached = await workers.say(asker, PROMPT, SHORT, owner.incarnation)
            assert found == expected
            assert cached == num_full
            owner = asker
        await workers.has_let_go()


@pytest.mark.parametrize(("first", "new"), some([("one", "four"), ("four", "one"), ("two", "four")], [("one", "four")]))
async def test_a_worker_begins_with_the_prefixes_of_others(runners: Sizes, first: str, new: str) -> None:
    async with model_workers(getattr(runners, first), runners.last, **SETTINGS) as workers:
        expected, _ = await workers.say(workers.a, PROMPT, SHORT)
        joined = await workers.join("new", getattr(runners, new), warms_up=True)
        found, cached = await workers.say(joined, PROMPT, SHORT)
        assert found == expected
        assert cached == len(PROMPT) // SIZE * SIZE
        await workers.has_let_go()


async def take(workers: ModelWorkers, follower: Follower) -> None:
    """What a router does when `a` is lost: `b` goes on."""
    request = TakeRequest(follower.seq_id, 1, workers.b.incarnation, "again", TakeReason.REFUSED)
    taken = await workers.store.take_ownership(request)
    snapshot = await workers.store.read(follower.seq_id, prompt=True, from_indexes=[0] * len(follower.items))
    admission = admission_to_wire(snapshot, epoch=taken.epoch, suspect=False, age_ms=0)
    answer = await workers.b.stub.Schedule(worker_pb2.ScheduleRequest(admissions=[admission]))
    assert answer.results[0].outcome == worker_pb2.ADMISSION_OUTCOME_ADMITTED, answer
    workers.tasks[-1].cancel()
    await follower.done.wait()
    follower.done.clear()
    workers.tasks.append(asyncio.create_task(follower.follow(workers.b.incarnation)))


@pytest.mark.parametrize(
    ("owner", "buddy"), some([("four", "one"), ("two", "four"), ("one", "four")], [("two", "four")])
)
async def test_the_buddy_of_a_group_goes_on_from_its_blocks(
    runners: Sizes, owner: str, buddy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_owner, "LONGEST_ROUND_S", 0.05)
    monkeypatch.setattr(standby_owner, "CANDIDATES_S", 0.1)
    settings = {**SETTINGS, "standby": True, "standby_tokens": 16}
    async with model_workers(getattr(runners, owner), getattr(runners, buddy), **settings) as workers:
        workers.a.runner.step_s = SLOW_S
        follower = await workers.run(LONG, prompt=PROMPT, num_tokens=30)
        sequences = workers.a.worker.standby_owner.sequences
        await until(lambda: 0 < sequences.num_sealed_blocks <= sequences.num_held_blocks + 2 * 2, 60)
        await take(workers, follower)
        found = await workers.outputs(follower)
        assert workers.b.runner.num_prefill < len(PROMPT)  # not even the prompt
        alone = await workers.join("alone", runners.last, standby=False)
        expected, _ = await workers.say(alone, PROMPT, LONG)
        assert found == expected


@pytest.mark.parametrize(
    ("source", "target"), some([("four", "one"), ("one", "two"), ("two", "four")], [("four", "one")])
)
async def test_a_prompt_is_computed_by_a_group_of_another_size(runners: Sizes, source: str, target: str) -> None:
    """Its blocks go on while it is computed, and the first token comes from the worker for outputs, or soon does."""
    prompt, params = tuple((i * 11 + 1) % 250 for i in range(600)), greedy(40)
    settings = {**SETTINGS, "max_batch_tokens": 64}
    async with model_workers(getattr(runners, source), getattr(runners, target), **settings) as workers:
        workers.a.runner.step_s = SLOW_S
        follower = await workers.run(params, prompt=prompt, num_tokens=0)
        moved = await workers.a.migrate(follower.seq_id, target=workers.b.incarnation, during_prefill=True)
        assert moved.outcome == MOVED
        assert moved.num_sent_blocks >= len(prompt) // SIZE
        found = await workers.outputs(follower)
        assert workers.b.runner.num_prefill < SIZE
        alone = await workers.join("alone", runners.last)
        expected, _ = await workers.say(alone, prompt, params)
        assert found == expected
        await workers.has_let_go()


@pytest.mark.parametrize("size", some(["two", "four"], ["two"]))
async def test_blocks_come_back_from_the_host_pool_of_a_group(runners: Sizes, size: str) -> None:
    """Those of a prefix that was evicted, and those of a sequence that was swapped out."""
    prompts = [tuple((i * 7 + number) % 250 for i in range(400)) for number in range(4)]  # 200 blocks
    brief = greedy(6)
    async with model_workers(getattr(runners, size), runners.last, **SETTINGS) as workers:
        group, tier = workers.a, workers.a.worker.workload.tables.tier
        group.runner.step_s = SLOW_S  # so that a copy is quicker
        expected = [(await workers.say(workers.b, prompt, brief))[0] for prompt in prompts]
        for number in (0, 1, 2, 3, 0, 1):
            found, _ = await workers.say(group, prompts[number], brief)
            assert found == expected[number]
        assert tier.num_promoted > 0
        params = replace(LONG, max_tokens=60)
        whole, _ = await workers.say(workers.b, PROMPT, params)
        follower = await workers.run(params, prompt=PROMPT, num_tokens=9)
        for operation in (worker_pb2.SWAP_OPERATION_OUT, worker_pb2.SWAP_OPERATION_IN):
            item = worker_pb2.SwapItem(seq_id=follower.seq_id, epoch=1, operation=operation)
            (result,) = (await group.stub.Swap(worker_pb2.SwapRequest(items=[item]))).results
            assert not result.HasField("failure"), result
        assert await workers.outputs(follower) == whole
        await workers.has_let_go()
