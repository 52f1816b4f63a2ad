"""What rank 0 tells other ranks by pipes: it is told to who reads, and nobody waits for ever for one who does not."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.models.decoders.ranks.place import TeamBroken
from gpu_worker.running.memory.rank_arena import GroupCopier

MANY = [(number, number) for number in range(1 << 15)]  # more than a pipe holds


@pytest.fixture
def team() -> Iterator[Any]:
    read_end, write_end = os.pipe()
    yield SimpleNamespace(place=SimpleNamespace(pipes=[write_end]), trouble="")
    os.close(read_end)


def lose(team: Any, copier: GroupCopier) -> None:
    team.trouble = "rank 1 has said nothing"


@pytest.mark.parametrize(("end", "says"), [(lambda team, copier: copier.close(), "closed"), (lose, "rank 1")])
def test_a_pipe_that_a_stopped_rank_has_left_full_is_given_up(
    team: Any, end: Callable[[Any, GroupCopier], None], says: str
) -> None:
    copier: Any = GroupCopier(SimpleNamespace(), team)
    with ThreadPoolExecutor(1) as executor:
        copying = executor.submit(copier.copy_out, MANY)
        with pytest.raises(TimeoutError):
            copying.result(0.2)
        end(team, copier)
        with pytest.raises(TeamBroken, match=says):
            copying.result(10)
    if end is lose:
        copier.close()
