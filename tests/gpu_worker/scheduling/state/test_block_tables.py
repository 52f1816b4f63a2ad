"""What branches of a model in which every layer has a window hold, on the device and in the host pool."""

import pytest
from scheduler_bench import Bench

from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.testing.fake_runner import new_runner_info
from octavo.request.sampling import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def bench(window: int = 9, num_blocks: int = 8, **config) -> Bench:
    """Blocks of four tokens."""
    return Bench(runner={"window": window, "num_blocks": num_blocks, "context_tokens": 4096}, **config)


def held(branch: Branch) -> int:
    return len(branch.blocks) - branch.num_passed


@pytest.mark.parametrize(
    ("window", "at_once"), [(0, 0), (1, 2), (2, 2), (4, 2), (5, 2), (6, 3), (9, 3), (10, 4), (4096, 1025)]
)
def test_how_many_blocks_a_branch_of_any_length_needs(window: int, at_once: int) -> None:
    info = new_runner_info("fake", "none", 1, False, block_size=4, window=window)
    assert info.max_sequence_blocks == at_once


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_decode_holds_its_window_only(prefix_caching: bool) -> None:
    world = bench(prefix_caching=prefix_caching)
    branch = world.admit("a", 5, LONG).branches[0]
    most = 0
    while world.scheduler.has_work:
        world.step()
        most = max(most, held(branch))
        seen = max(0, branch.num_computed + 1 - 9)  # the first token that the next one sees
        assert branch.num_passed * 4 <= seen, "a block that is still seen was given back"
        assert world.load().num_used_blocks == held(branch)
    assert most == world.runner.info.max_sequence_blocks == 3
    assert len(world.tokens["a.0"]) == 60


@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_a_prompt_much_longer_than_the_memory_runs(chunked_prefill: bool) -> None:
    world = bench(num_blocks=5, chunked_prefill=chunked_prefill)
    world.admit("a", 500)
    world.finish()
    assert len(world.tokens["a.0"]) == 8
    assert world.load().num_used_blocks == 0
