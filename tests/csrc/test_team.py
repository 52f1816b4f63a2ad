"""Ranks that meet: what each wrote before is there for all after it, and none waits for one that does not come.

Ranks are threads here: a meeting does not know whether those whom it waits for are processes.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

CONTROL = 8192  # bytes before the room


def team_memory(num_bytes: int = 4096) -> torch.Tensor:
    whole = torch.zeros(CONTROL + num_bytes + 64, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    return whole[start : start + CONTROL + num_bytes]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_see_what_each_wrote_before(extension: ModuleType, size: int) -> None:
    memory, rng = team_memory(), random.Random(size)
    room = memory[CONTROL:].view(torch.int64)
    pauses = [[rng.random() < 0.05 for _ in range(100)] for _ in range(size)]

    def rank(number: int) -> None:
        team = extension.Team(memory, number, size, 30.0)
        for turn in range(100):
            if pauses[number][turn]:
                time.sleep(0.001)
            room[number] = turn * size + number
            assert team.meet()
            assert room[:size].tolist() == [turn * size + other for other in range(size)]
            assert team.meet()

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(rank, range(size), timeout=60))


def test_who_does_not_come_or_breaks_off_holds_up_nobody(extension: ModuleType) -> None:
    memory = team_memory()
    first, second = (extension.Team(memory, rank, 3, 0.2) for rank in range(2))
    with ThreadPoolExecutor() as ranks:
        list(ranks.map(lambda team: team.meet(), (first, second), timeout=20))
    assert "rank 2 has not come" in first.trouble and first.trouble == second.trouble
    assert not first.meet()
    memory = team_memory()
    waiting, other = (extension.Team(memory, rank, 2, 60.0) for rank in range(2))
    with ThreadPoolExecutor() as ranks:
        meeting = ranks.submit(waiting.meet)
        time.sleep(0.1)
        other.break_off()
        assert not meeting.result(20)
    assert waiting.trouble == "a rank has ended"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory": torch.zeros(CONTROL, dtype=torch.uint8)}, "memory"),
        ({"memory": torch.zeros(99999, dtype=torch.int8)}, "memory"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"size": 0}, "size"),
        ({"size": 65}, "size"),
        ({"patience_s": 0.0}, "patience_s"),
        ({"stages": 0}, "stages"),
        ({"size": 3, "stages": 2}, "stages"),
    ],
)
def test_what_is_no_team_is_refused_by_name(extension: ModuleType, changes: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        extension.Team(**{"memory": team_memory(), "rank": 0, "size": 2, "patience_s": 1.0} | changes)
