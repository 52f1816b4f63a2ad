"""The model checker itself, and a slice of what `make modelcheck` explores."""

import pytest
from modelcheck.configurations import CONFIGURATIONS, SMALL
from modelcheck.explorer import Step, explore
from modelcheck.stored import NOW_MS, StoreModel
from modelcheck.system import System, worker_member
from modelcheck.weakenings import QUICK, WEAKENINGS

from octavo.store.memory import MemoryState

MAX_STATES = 100_000


class Counter:
    """Counts up to 3, and then stays. Without `ends`, 3 is no end."""

    def __init__(self, wrong_at: int = -1, *, ends: bool = True) -> None:
        self.wrong_at, self.ends = wrong_at, ends

    def initial(self):
        return 0

    def steps(self, state):
        return [Step("up", min(state + 1, 3))]

    def wrong(self, state):
        return "wrong" if state == self.wrong_at else ""

    def is_end(self, state):
        return self.ends and state == 3


def test_the_explorer_visits_all_states_and_finds_the_shortest_way_to_what_is_wrong():
    good = explore(Counter(), 100)
    assert good.good
    assert (good.num_states, good.longest, good.trace) == (4, 3, ())
    wrong = explore(Counter(wrong_at=2), 100)
    assert not wrong.good
    assert (wrong.wrong, wrong.trace) == ("wrong", ("up", "up"))
    assert not explore(Counter(), 2).complete


def test_a_state_without_a_way_to_an_end_is_stuck():
    assert explore(Counter(ends=False), 100).wrong.startswith("stuck")


def test_a_number_stands_for_one_state_of_the_store():
    stores = StoreModel()
    beaten, _ = stores.call(0, "heartbeat", worker_member("w"), 3000)
    assert stores.call(0, "heartbeat", worker_member("w"), 3000)[0] == beaten != 0
    assert stores.call(beaten, "heartbeat", worker_member("w"), 3000)[0] == beaten, "nothing has changed"
    later = stores.advance(beaten, 1000)
    assert stores.view(later).lease_end("w") == NOW_MS + 2000
    assert stores.view(beaten).lease_end("w") == NOW_MS + 3000, "no state is changed"
    over = stores.advance(later, 5000)
    assert not stores.view(over).lease_alive("w")
    assert stores.advance(over, 5000) == over, "what is past stays past"


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_rule_is_broken_in_any_state(name: str) -> None:
    found = explore(System(CONFIGURATIONS[name]), MAX_STATES)
    assert found.good, (found.wrong or "not explored completely", *found.trace)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_weaker_protocol_is_seen(name: str) -> None:
    with WEAKENINGS[name].applied():
        found = explore(System(WEAKENINGS[name].configuration), MAX_STATES)
    assert found.wrong, f"{name}: not seen in {found.num_states} states"
    assert found.trace


def test_a_weakening_is_taken_back() -> None:
    before = (MemoryState.freeze_ms, MemoryState.detach)
    for weakening in WEAKENINGS.values():
        with weakening.applied():
            pass
    assert before == (MemoryState.freeze_ms, MemoryState.detach)
