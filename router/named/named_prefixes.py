"""The prefixes that operators have named, as the store has them: found by name, and counted where prompts begin so."""

from collections import Counter
from collections.abc import Sequence

from octavo.request.errors import NotFound, TooManyPrefixes
from octavo.request.named_prefix import MAX_PREFIXES, NamedPrefix, key_of
from octavo.store.base import Store
from router.named.named_entries import NamedEntries

MAX_LISTED = 16  # names in a message


class NamedPrefixes:
    """What this router knows of them. `PrefixKeeper` reads them anew every second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries = NamedEntries(store.prefixes, NamedPrefix.parse, "prefix")
        self.num_requests: Counter[str] = Counter()  # by key: prompts that began so

    async def refresh(self) -> None:
        """Reads what the store has. Raises StoreUnavailable."""
        if await self._entries.refresh():
            known = self._entries.known
            self.num_requests = Counter({key: count for key, count in self.num_requests.items() if key in known})

    def all(self) -> list[NamedPrefix]:
        """In the order of their names."""
        return sorted(self._entries.known.values(), key=lambda each: (each.name, each.model, each.tenant))

    async def add(self, prefix: NamedPrefix) -> None:
        """Raises TooManyPrefixes, StoreUnavailable."""
        if not await self._store.put_prefix(prefix.key, prefix.pack(), MAX_PREFIXES):
            raise TooManyPrefixes(f"there are {MAX_PREFIXES} prefixes: remove one")
        await self.refresh()

    async def replace(self, old: NamedPrefix, new: NamedPrefix) -> None:
        """The new one stands in the old one's place, unless there is one of its model. Raises StoreUnavailable."""
        is_there = new.key in self._entries.known
        if not is_there and not await self._store.put_prefix(new.key, new.pack(), MAX_PREFIXES + 1):
            return  # a name too many, also once the old one is gone
        await self._store.drop_prefix(old.key)
        await self.refresh()

    async def remove(self, model: str, tenant: str, name: str) -> None:
        """Raises NotFound, StoreUnavailable."""
        if not await self._store.drop_prefix(key_of(model, tenant, name)):
            raise self._missing(model, tenant, name)
        await self.refresh()

    async def find(self, model: str, tenant: str, name: str) -> NamedPrefix:
        """Raises NotFound. One that this router does not know may have been added a moment ago."""
        key = key_of(model, tenant, name)
        if key not in self._entries.known:
            await self.refresh()
        if key not in self._entries.known:
            raise self._missing(model, tenant, name)
        return self._entries.known[key]

    def note_prompt(self, model: str, tenant: str, tokens: Sequence[int]) -> None:
        """Counts a request, by each prefix with which its prompt begins."""
        for key, prefix in self._entries.known.items():
            if (prefix.model, prefix.tenant) == (model, tenant) and begins_with(tokens, prefix.tokens):
                self.num_requests[key] += 1

    def _missing(self, model: str, tenant: str, name: str) -> NotFound:
        names = [each.name for each in self.all() if (each.model, each.tenant) == (model, tenant)]
        there = f"there is {', '.join(names[:MAX_LISTED])}" if names else "none has a name"
        what = f"prefix: no prefix {name[:64]!r} of this model and tenant; {there}"
        return NotFound(what, resource="prefix", name=name)


def begins_with(tokens: Sequence[int], beginning: Sequence[int]) -> bool:
    """Looks at the last token first: all chats of a model begin alike."""
    size = len(beginning)
    return len(tokens) >= size and tokens[size - 1] == beginning[-1] and tuple(tokens[:size]) == beginning
