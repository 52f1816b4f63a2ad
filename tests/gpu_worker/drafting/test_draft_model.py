"""A draft model keeps its own blocks right, guesses what it would draw itself, and changes no output."""

from typing import Any

import pytest
from scheduler_bench import Bench

from gpu_worker.drafting.draft_model import DraftedBranch, DraftModel
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.sampling import PARAMETERS, SamplingParams

SIZES = {"block_size": 4, "vocab_size": 97}


def params(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=(0.0, 0.7, 1.3)[number % 3],
        seed=number,
        max_tokens=20 + 7 * number,
        ignore_eos=True,
        n=1 + (number == 4),
        presence_penalty=0.3 * (number == 1),
    )


def outputs(draft_model: DraftModel | None, speculation: str = "lookup") -> tuple[Bench, dict[str, list[int]]]:
    """The tokens of six requests, of which some preempt others."""
    runner = WitnessRunner(num_blocks=40, num_host_blocks=20, **SIZES)
    bench = Bench(runner=runner, draft_model=draft_model, speculation=speculation, max_batch_tokens=48)
    for number in range(6):
        bench.admit(f"s{number}", 3 + 11 * number, params(number), root=b"")
    bench.finish()
    assert not runner.mismatches, runner.first_mismatch
    return bench, bench.tokens


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    return outputs(None, "off")[1]


def checked(undisturbed: dict[str, list[int]], kind=WitnessRunner, **sizes) -> tuple[Any, int, int]:
    """A draft model of another runner, and how many drafts it gave and were right: outputs are the same."""
    guessing = kind(**{"num_blocks": 200, "num_host_blocks": 0, **SIZES, **sizes})
    model = DraftModel(guessing, SIZES["vocab_size"])
    bench, found = outputs(model)
    assert found == undisturbed
    assert not getattr(guessing, "mismatches", 0), guessing.first_mismatch
    return model, bench.workload.num_drafts["model"], bench.workload.num_accepted_drafts["model"]


@pytest.mark.parametrize("num_blocks", [200, 45, 20])
def test_the_same_model_is_always_right(undisturbed: dict[str, list[int]], num_blocks: int) -> None:
    """Also with blocks for some branches alone, which drive each other out."""
    _, drafts, accepted = checked(undisturbed, num_blocks=num_blocks)
    assert accepted == drafts > 30


def test_guesses_are_drawn_through_the_filters_of_their_branch() -> None:
    given = SamplingParams(**{row.name: 0.3 for row in PARAMETERS.values() if row.is_filter}, temperature=0.7, seed=5)
    assert DraftedBranch.of(given, num_prompt=1, index=0).params == given


def test_another_model_is_seldom_right_and_soon_seldom_asked(undisturbed: dict[str, list[int]]) -> None:
    _, drafts, accepted = checked(undisturbed, FakeRunner)
    assert accepted < drafts / 5
    assert drafts < sum(map(len, undisturbed.values())) / 4
    checked(undisturbed, vocab_size=5000)  # tokens that the larger model has not are no guesses


def test_a_model_that_fails_is_not_asked_again(undisturbed: dict[str, list[int]]) -> None:
    class Failing(WitnessRunner):
        def run(self, step):
            raise RuntimeError("no more")

    assert checked(undisturbed, Failing)[0].failed
