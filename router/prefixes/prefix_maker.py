"""Makes named prefixes of texts, and makes them anew: for a model that has taken the name of another one, and every day
where the chat template writes the date.
"""

import asyncio
import datetime
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from octavo.request.errors import InvalidArgument
from octavo.request.named_prefix import NamedPrefix
from octavo.store.base import Store
from router.fleet.model_registry import ModelRegistry, ServedModel
from router.named.named_prefixes import NamedPrefixes

log = logging.getLogger(__name__)

ROUND_S = 3.0
DATES = "strftime_now"  # what a template calls that writes the date


class Beginning(Protocol):
    async def __call__(self, model: ServedModel, text: str, *, is_system: bool) -> list[int]:
        """The tokens with which all prompts begin that have this system message, or this text."""
        ...


@dataclass(eq=False)
class PrefixMaker:
    """Lives on the router's event loop."""

    prefixes: NamedPrefixes
    models: ModelRegistry
    store: Store
    beginning: Beginning
    _made_on: dict[str, datetime.date] = field(default_factory=dict)  # by key: those in which the date stands
    _impossible: set[tuple[str, str]] = field(default_factory=set)  # keys, and fingerprints that they are not for

    async def make(
        self, model: ServedModel, tenant: str, name: str, text: str, *, is_system: bool, workers: int
    ) -> NamedPrefix:
        """Raises InvalidArgument if the tokens fill no block, or the model's context."""
        tokens = await self.beginning(model, text, is_system=is_system)
        which, what = "system" if is_system else "text", f"its prompts have {len(tokens)} tokens in common"
        if len(tokens) < model.block_size:
            raise InvalidArgument(which, f"{what}, too few to fill a block of {model.block_size}; give a longer text")
        if len(tokens) >= model.context_tokens:
            room = f"no room in a context of {model.context_tokens}"
            raise InvalidArgument(which, f"{what}, which leave {room}; give a shorter text")
        return NamedPrefix(name, model.fingerprint, tenant, is_system, text, tuple(tokens), workers, model.name)

    async def follow_models(self) -> None:
        """Gives prefixes of a model that no worker has any more to the model that is served by its name now.

        One round, with the pause before the next. All routers read the same workers in the store, so they do the same,
        and twice is as good as once.
        """
        await asyncio.sleep(ROUND_S)
        living = await self._living()
        if not living:
            return  # some worker has not said yet what it has
        by_name = {model.name: model for model in self.models.list_models() if model.fingerprint in living}
        for old in self.prefixes.all():
            model = by_name.get(old.served_as)
            if model is None or not model.tokenizer.has_text:
                continue
            if old.model in living:
                await self._follow_date(old, model)
                continue
            if (old.key, model.fingerprint) in self._impossible:
                continue
            try:
                new = await self.make(
                    model, old.tenant, old.name, old.text, is_system=old.is_system, workers=old.workers
                )
            except InvalidArgument as error:
                self._impossible.add((old.key, model.fingerprint))
                log.warning("prefix %s cannot be one of the %s that is served now: %s", old.name, model.name, error)
                continue
            await self.prefixes.replace(old, new)
            log.info("prefix %s is one of the %s that is served now: %d tokens", new.name, model.name, len(new.tokens))

    async def _follow_date(self, old: NamedPrefix, model: ServedModel) -> None:
        """Makes a prefix anew, once a day, whose template writes the date: yesterday's begins no prompt any more."""
        today = datetime.date.today()
        is_dated = old.is_system and DATES in model.tokenizer.chat_template
        if not is_dated or old.model != model.fingerprint or self._made_on.get(old.key) == today:
            return
        with suppress(InvalidArgument):  # the tokens in common have become too few
            new = await self.make(model, old.tenant, old.name, old.text, is_system=True, workers=old.workers)
            await self.prefixes.refresh()
            if new.tokens != old.tokens and old in self.prefixes.all():  # nobody has removed or replaced it meanwhile
                await self.prefixes.add(new)
                log.info("prefix %s has the date of today: %d tokens", new.name, len(new.tokens))
        known = {each.key for each in self.prefixes.all()}
        self._made_on = {key: day for key, day in self._made_on.items() if key in known} | {old.key: today}

    async def _living(self) -> set[str]:
        """The fingerprints of all workers in the store, met here or not; empty if one of them has not said its own."""
        infos = [json.loads(member.info) for member in await self.store.members("worker")]
        found = {str(info.get("fingerprint", "")) for info in infos}
        return set() if "" in found else found
