"""Which sequences a worker that drains releases first, and to whom. tests/router/test_draining.py has whole drains."""

import json
from types import SimpleNamespace

import pytest

from gpu_worker.serving.drain import describe_worker, takes_over
from gpu_worker.serving.engine_client import replay_cost
from octavo.ids import Incarnation
from octavo.store.calls import Member


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


def described(**changed: object) -> Member:
    info = json.loads(describe_worker({"worker_id": "w"}, "weights", "layout", draining=False))
    return Member("worker", Incarnation("w"), json.dumps({**info, **changed}).encode())


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (described(), True),
        (described(draining=True), False),
        (described(fingerprint="others"), False),
        (described(layout="others"), False),
        (Member("worker", Incarnation("w"), b'{"worker_id": "w"}'), True),
        (Member("worker", Incarnation("w"), b"not JSON"), False),
        (Member("worker", Incarnation("w"), b"[]"), False),
    ],
)
def test_who_takes_over(member, expected):
    assert takes_over(member, "weights", "layout") is expected
