"""Which sequences a worker that drains releases first. tests/router/test_draining.py has whole drains."""

from types import SimpleNamespace
from typing import Any

from gpu_worker.serving.leaving.releaser import OutgrownRelease, replay_cost
from octavo.request.errors import StoreUnavailable


def sequence(num_prompt: int, *branches: tuple[int, int]) -> SimpleNamespace:
    """A sequence whose branches have so many output tokens, and so many tokens computed."""
    made = [SimpleNamespace(num_output=output, num_computed=computed) for output, computed in branches]
    return SimpleNamespace(prompt=[0] * num_prompt, branches=made)


def test_what_waits_costs_least_then_what_is_short():
    waiting = sequence(900, (0, 0))
    short, long = sequence(10, (5, 14)), sequence(10, (200, 209))
    two = sequence(10, (4, 13), (4, 13))
    assert sorted([long, two, short, waiting], key=replay_cost) == [waiting, short, two, long]
    assert [replay_cost(each)[1] for each in (waiting, short, two)] == [900, 15, 18]


async def test_limits_are_learned_through_an_outage() -> None:
    """Else a worker that has just started ends with LENGTH what a larger one could hold."""
    workload: Any = SimpleNamespace(larger_limit=0, info=SimpleNamespace(fingerprint="f"))
    others = [SimpleNamespace(fingerprint=name, prompt_limit=limit) for name, limit in (("f", 700), ("other", 900))]
    answers: list[object] = [StoreUnavailable("away"), StoreUnavailable("away"), others]

    async def note_limits(seen: object, kept_ms: int) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store: Any = SimpleNamespace(note_limits=note_limits)
    releaser: Any = SimpleNamespace()
    await OutgrownRelease(store, workload, releaser).learn_limits()
    assert (answers, workload.larger_limit) == ([], 700)
