"""Recent outputs guess for requests of the same root, and never for others; what they keep is bounded."""

import random
from collections import defaultdict

import pytest

from gpu_worker.drafting import recent_outputs
from gpu_worker.drafting.recent_outputs import END, SIZES, RecentLookup, RecentOutputs, Shelf

ROOTS = (b"first", b"second", b"third")


def a_text(rng: random.Random) -> list[int]:
    return rng.choices((0, 1), k=rng.randrange(30))


def stands_in(some: list[int], text: list[int]) -> bool:
    return any(text[place : place + len(some)] == some for place in range(len(text)))


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent_outputs, "INDEXED_AT_ONCE", 7)
        patch.setattr(recent_outputs, "ROOM", 500)
        yield


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_what_came_after_the_same_tokens_in_outputs_of_the_same_root(seed):
    """Two tokens alone, so that every text could go on in every output."""
    rng = random.Random(seed)
    outputs, ended = RecentOutputs(), defaultdict(list)
    lookups = {root: RecentLookup(outputs, root) for root in ROOTS}
    asked = {root: [] for root in ROOTS}
    for _ in range(60):
        root = rng.choice(ROOTS)
        if rng.random() < 0.5:
            prompt, output = a_text(rng), a_text(rng)
            outputs.add(root, [*prompt, *output], len(prompt))
            ended[root].append([*prompt, *output])
        outputs.index_some()
        tokens = asked[root]
        tokens += a_text(rng)
        length = lookups[root].find(tokens)
        drafts = lookups[root].draft(tokens, rng.randint(1, 9)) if length else []
        assert bool(drafts) == bool(length)
        if length:
            seen = [*tokens[-length:], *drafts]
            assert any(stands_in(seen, text) for text in ended[root])


@pytest.mark.parametrize(("num_prompt", "count"), [(4, 1), (11, 5), (30, 50)])
def test_a_request_that_comes_again_is_guessed_from_its_first_token_on(num_prompt, count):
    prompt, output = list(range(num_prompt)), list(range(100, 140))
    outputs = RecentOutputs()
    outputs.add(b"root", [*prompt, *output], len(prompt))
    for _ in output:
        outputs.index_some()
    lookup, tokens = RecentLookup(outputs, b"root"), list(prompt)
    while len(tokens) < len(prompt) + len(output):
        assert lookup.find(tokens)
        tokens += lookup.draft(tokens, count)
    assert tokens == [*prompt, *output]
    assert not lookup.find(tokens)


def test_a_text_that_differs_in_one_token_goes_on_being_followed():
    outputs, text = RecentOutputs(), [*range(30)]
    outputs.add(b"root", [*text, 99], 5)
    outputs.add(b"root", [*range(50, 60), 11, 12, 13, 14, 77], 10)  # a later place of the same four tokens
    for _ in range(9):
        outputs.index_some()
    lookup = RecentLookup(outputs, b"root")
    assert lookup.find(text[:10]) and lookup.draft(text[:10], 3) == [10, 11, 12]
    changed = [*text[:10], 88, *text[11:15]]
    assert lookup.find(changed) == 4
    assert lookup.draft(changed, 2) == [15, 16]


def test_old_outputs_of_a_root_are_forgotten_and_then_idle_roots(monkeypatch):
    monkeypatch.setattr(recent_outputs, "MAX_ROOTS", 3)
    outputs = RecentOutputs()

    def known(root: bytes, first: int) -> bool:
        return bool(RecentLookup(outputs, root).find(list(range(first, first + SIZES[-1]))))

    def add(root: bytes, first: int) -> None:
        outputs.add(root, list(range(first, first + 40)), 4)
        for _ in range(6):
            outputs.index_some()

    for first in range(0, 4000, 100):
        add(b"busy", first)
    assert known(b"busy", 3900) and not known(b"busy", 1000)
    sizes = [len(shelf.tokens) for shelf in outputs.shelves(b"busy")]
    assert len(sizes) == 2 and max(sizes) <= recent_outputs.ROOM
    add(b"a", 0)
    add(b"b", 0)
    assert known(b"busy", 3900)
    add(b"c", 0)
    assert [known(b"busy", 3900), known(b"c", 0), known(b"a", 0)] == [True, True, False]


def test_a_place_with_the_hash_of_others_is_not_found():
    shelf = Shelf()
    shelf.tokens.extend([END, 1, 2, 3, 4, 5])
    for table in shelf.tables:
        for place in range(len(table)):
            table[place] = 5
    assert shelf.find([9, 9, 9, 9]) == (0, 0)
    assert shelf.find([1, 2, 3, 4]) == (5, 4)
