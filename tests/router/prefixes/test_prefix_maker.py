"""A prefix in which the date stands is made anew every day, and no other one is."""

import datetime
import json
from types import SimpleNamespace

import pytest

from octavo.store.memory import MemoryStore
from router.named.named_prefixes import NamedPrefixes
from router.prefixes import prefix_maker
from router.prefixes.prefix_maker import PrefixMaker

DAYS = [datetime.date(2026, 11, 27), datetime.date(2026, 11, 28)]


@pytest.mark.parametrize("is_dated", [True, False])
async def test_a_dated_prefix_is_made_anew_every_day(monkeypatch, is_dated):
    monkeypatch.setattr(prefix_maker, "ROUND_S", 0.0)
    template = "{{ strftime_now('%d') }}" if is_dated else ""
    tokenizer = SimpleNamespace(has_text=True, chat_template=template)
    model = SimpleNamespace(name="m", fingerprint="f", tokenizer=tokenizer, block_size=4, context_tokens=99)
    asked, day = [], DAYS[0]

    class Clock:
        @staticmethod
        def today():
            return day

    async def beginning(_, text, *, is_system):
        asked.append(day)
        return [day.day if is_dated else 1] * len(text)

    async def members(_):
        return [SimpleNamespace(info=json.dumps({"fingerprint": "f"}))]

    monkeypatch.setattr(prefix_maker, "datetime", SimpleNamespace(date=Clock))
    prefixes = NamedPrefixes(MemoryStore())
    models = SimpleNamespace(list_models=lambda: [model])
    maker = PrefixMaker(prefixes, models, SimpleNamespace(members=members), beginning)
    await prefixes.add(await maker.make(model, "", "sea", "system", is_system=True, workers=1))
    for day in DAYS:
        for _ in range(3):
            await maker.follow_models()
        (found,) = prefixes.all()
        assert found.tokens == (day.day if is_dated else 1,) * 6
    assert len(asked) == (3 if is_dated else 1), "once by the operator, and once a day by this router"


async def test_a_prefix_that_is_removed_meanwhile_does_not_come_back(monkeypatch):
    monkeypatch.setattr(prefix_maker, "ROUND_S", 0.0)
    tokenizer = SimpleNamespace(has_text=True, chat_template=prefix_maker.DATES)
    model = SimpleNamespace(name="m", fingerprint="f", tokenizer=tokenizer, block_size=4, context_tokens=99)
    prefixes, count = NamedPrefixes(MemoryStore()), 0

    async def beginning(_, text, *, is_system):
        nonlocal count
        count += 1
        if count == 2:  # the operator is quicker than the tokenizer
            await prefixes.remove("f", "", "sea")
        return [count] * len(text)

    async def members(_):
        return [SimpleNamespace(info=json.dumps({"fingerprint": "f"}))]

    maker = PrefixMaker(
        prefixes, SimpleNamespace(list_models=lambda: [model]), SimpleNamespace(members=members), beginning
    )
    await prefixes.add(await maker.make(model, "", "sea", "system", is_system=True, workers=1))
    await maker.follow_models()
    assert count == 2 and not prefixes.all()
