"""Which sequences a worker that drains releases first. tests/router/test_draining.py has whole drains."""

from types import SimpleNamespace

from gpu_worker.serving.leaving.releaser import replay_cost


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
