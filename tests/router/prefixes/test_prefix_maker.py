"""A prefix in which the date stands is made anew every day, and no other one is."""

import datetime
import json
from types import SimpleNamespace

import pytest

from octavo.request.errors import InvalidArgument
from octavo.store.memory import MemoryStore
from router.named.named_prefixes import NamedPrefixes
from router.prefixes import prefix_maker
from router.prefixes.prefix_maker import DATES, PrefixMaker

DAYS = [datetime.date(2026, 11, 27), datetime.date(2026, 11, 28)]


@pytest.fixture
def make(monkeypatch):
    """A maker of prefixes of one model whose beginnings are what a function says, one of which is made, and that."""
    monkeypatch.setattr(prefix_maker, "ROUND_S", 0.0)

    async def members(_):
        return [SimpleNamespace(info=json.dumps({"fingerprint": "f"}))]

    async def made(template, begin):
        async def beginning(_, text, *, is_system):
            return [await begin()] * len(text)

        tokenizer = SimpleNamespace(has_text=True, chat_template=template)
        model = SimpleNamespace(name="m", fingerprint="f", tokenizer=tokenizer, block_size=4, context_tokens=99)
        models, prefixes = SimpleNamespace(list_models=lambda: [model]), NamedPrefixes(MemoryStore())
        maker = PrefixMaker(prefixes, models, SimpleNamespace(members=members), beginning)
        await prefixes.add(await maker.make(model, "", "sea", "system", is_system=True, workers=1))
        return maker, prefixes

    return made


@pytest.mark.parametrize("is_dated", [True, False])
async def test_a_dated_prefix_is_made_anew_every_day(make, monkeypatch, is_dated):
    asked, day = [], DAYS[0]
    monkeypatch.setattr(prefix_maker, "datetime", SimpleNamespace(date=SimpleNamespace(today=lambda: day)))

    async def begin():
        asked.append(day)
        return day.day if is_dated else 1

    maker, prefixes = await make("{{ strftime_now('%d') }}" if is_dated else "", begin)
    for day in DAYS:
        for _ in range(3):
            await maker.follow_models()
        (found,) = prefixes.all()
        assert found.tokens == (day.day if is_dated else 1,) * 6
    assert len(asked) == (3 if is_dated else 1), "once by the operator, and once a day by this router"


async def test_a_prefix_that_is_removed_meanwhile_does_not_come_back(make):
    count = 0

    async def begin():
        nonlocal count
        count += 1
        if count == 2:  # the operator is quicker than the tokenizer
            await prefixes.remove("f", "", "sea")
        return count

    maker, prefixes = await make(DATES, begin)
    await maker.follow_models()
    assert count == 2 and not prefixes.all()


@pytest.mark.parametrize(("size", "says"), [(3, "a block of 4; give a longer"), (99, "context of 99; give a shorter")])
async def test_a_text_of_a_wrong_length_is_refused_with_the_remedy(make, size, says):
    async def begin():
        return 1

    maker, _ = await make("", begin)
    (model,) = maker.models.list_models()
    with pytest.raises(InvalidArgument, match=f"text: its prompts have {size} tokens in common, .*{says} text"):
        await maker.make(model, "", "air", "x" * size, is_system=False, workers=1)
