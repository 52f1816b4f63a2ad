"""What branches of a model in which every layer has a window hold, on the device and in the host pool."""

import pytest
from scheduler_bench import Bench

from gpu_worker.scheduling.state.sequence import Branch
from octavo.request.sampling import SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def bench(window: int = 9, num_blocks: int = 8, **config) -> Bench:
    """Blocks of four tokens."""
    return Bench(runner={"window": window, "num_blocks": num_blocks, "context_tokens": 4096}, **config)


def held(branch: Branch) -> int:
    return len(branch.blocks) - branch.num_passed


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
