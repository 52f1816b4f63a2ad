"""What other workers fetch from a group, and what they give it: blocks that are those of one process, to the bit."""

from pathlib import Path

import pytest
from effort import some

from gpu_worker import LLM, SamplingParams
from gpu_worker.running.loading import load_runner
from gpu_worker.steps.runner import Runner

from .conftest import SIZES

PROMPT = ("A prompt of several blocks, which both compute. " * 2)[:90]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)


def blocks_of(runner: Runner) -> list[bytes]:
    found = []
    for block in range(runner.info.num_blocks):
        with runner.block_memory.read_blocks([block]) as contents:
            found += [b"".join(map(bytes, runs)) for runs in contents]
    return found


def put_blocks(runner: Runner, blocks: list[bytes]) -> None:
    """As blocks of another worker come."""
    memory = runner.block_memory
    for number, data in enumerate(blocks):
        place, rest = memory.open_block(number), memoryview(data)
        for run in place:
            run[:], rest = rest[: len(run)], rest[len(run) :]
        memory.keep_block(number)
        memory.close_block(number)


def said(llm: LLM) -> object:
    (answer,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    return answer.outputs[0].token_ids, answer.outputs[0].logprobs


def check_blocks_travel(alone: Runner, several: Runner, folder: Path) -> None:
    one, other = (LLM(str(folder), runner=each) for each in (alone, several))
    expected = said(one)
    assert said(other) == expected
    assert blocks_of(several) == blocks_of(alone)  # what a prefix fetch, a standby and a move read
    put_blocks(several, [bytes(alone.info.bytes_per_block)] * alone.info.num_blocks)
    assert said(other) != expected  # it has not computed the prompt again
    assert said(one) == expected
    put_blocks(several, blocks_of(alone))
    assert said(other) == expected


@pytest.mark.parametrize(
    ("kind", "ranks", "stages"),
    some([("llama", 3, 1), ("llama", 1, 2), ("Olmoe", 2, 1), ("GPTNeo", 2, 1)], [("llama", 3, 1), ("llama", 1, 2)]),
)
def test_blocks_come_and_go_between_a_group_and_one_process(group, folders, kind, ranks, stages):
    options, folder = {"dtype": "float32", "swap_bytes": 0}, folders(kind)
    several = group(ranks, stages=stages, model=folder, **options)
    check_blocks_travel(load_runner(str(folder), **{**SIZES, **options}), several, folder)
