"""The model checker itself, and a slice of what `make modelcheck` explores."""

import pytest
from modelcheck.callers import Callers
from modelcheck.configurations import CONFIGURATIONS, SMALL
from modelcheck.explorer import Step, explore
from modelcheck.stored import NOW_MS, StoreModel
from modelcheck.weakenings import WEAKENINGS

from octavo.store.calls import Member
from octavo.store.memory import MemoryState

MAX_STATES = 100_000


class Counter:
    """Counts up to 3, and then stays."""

    def __init__(self, wrong_at: int = -1) -> None:
        self.wrong_at = wrong_at

    def initial(self):
        return 0

    def steps(self, state):
        return [Step("up", min(state + 1, 3), "wrong" if state == self.wrong_at else "")]


def test_the_explorer_finds_the_shortest_way():
    good = explore(Counter(), 100)
    assert (good.good, good.num_states, good.trace) == (True, 4, ())
    wrong = explore(Counter(wrong_at=1), 100)
    assert (wrong.good, wrong.wrong, wrong.trace) == (False, "wrong", ("up", "up"))
    assert not explore(Counter(), 2).complete


def test_a_number_stands_for_one_state():
    stores, member = StoreModel(), Member("worker", "w", b"")
    beaten, _ = stores.call(0, "heartbeat", member, 3000)
    assert stores.call(0, "heartbeat", member, 3000)[0] == beaten != 0
    assert stores.call(beaten, "heartbeat", member, 3000)[0] == beaten, "nothing has changed"
    later = stores.advance(beaten, 1000)
    assert stores.view(later).lease_end("w") == NOW_MS + 2000
    assert stores.view(beaten).lease_end("w") == NOW_MS + 3000, "no state is changed"
    over = stores.advance(later, 5000)
    assert not stores.view(over).lease_alive("w")
    assert stores.advance(over, 5000) == over, "what is past stays past"


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_no_rule_is_broken_in_any_state(name: str) -> None:
    found = explore(Callers(CONFIGURATIONS[name]), MAX_STATES)
    assert found.good, (found.wrong or "not explored completely", *found.trace)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEAKENINGS)
def test_a_weaker_store_is_seen(name: str) -> None:
    before = (MemoryState.freeze_ms, MemoryState.detach)
    with WEAKENINGS[name].applied():
        found = explore(Callers(WEAKENINGS[name].configuration), MAX_STATES)
    assert found.wrong, f"{name}: not seen in {found.num_states} states"
    assert found.trace
    assert before == (MemoryState.freeze_ms, MemoryState.detach), "a weakening is taken back"
