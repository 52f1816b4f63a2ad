"""Which low-rank adapters a worker has in memory, within a bound of bytes.

An adapter stays while a sequence here runs with it, or waits; of the others the one that was used longest ago goes
first. Which are in use is asked when room is wanted, so nobody has to give one back.

Where those in use leave no room, they take turns: once another adapter has been asked for in vain for TURN_S, the one
that came into memory longest ago gets no new sequences until the other one is there. Before that it has had TURN_S for
its own. So each waits no longer than the turns and the sequences of those before it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpu_worker.steps.runner import AdapterMemory, ReadAdapter
from octavo.model_files.lora_support import NO_LORA, LoraSupport
from octavo.request.errors import NoAdapterRoom, TooLarge, Unimplemented

TURN_S = 2.0
CLAIM_S = 3.0  # an adapter that nobody has asked for again for so long waits no more: routers ask twice a second
MAX_SIZES = 1024  # of adapters whose sizes are remembered


@dataclass(slots=True)
class Claim:
    """An adapter that has been asked for in vain."""

    since: float
    asked_at: float


class KeptAdapter(NamedTuple):
    number: int
    num_bytes: int
    since: float


class AdapterShelf:
    """Only between two steps, except for `read` and `digests`."""

    def __init__(
        self,
        memory: AdapterMemory | None,
        max_bytes: int,
        in_use: Callable[[], Collection[int]],
        support: LoraSupport = NO_LORA,
    ) -> None:
        """Without a `memory` no adapter runs here: `support` says why. `in_use` has the numbers of those that stay."""
        self._memory = memory
        self._support = support
        self._in_use = in_use
        self._max_bytes = max_bytes if memory is not None else 0
        self._there: OrderedDict[str, KeptAdapter] = OrderedDict()  # by digest; the one that was used last comes last
        self._claims: dict[str, Claim] = {}  # by digest, the oldest first
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by digest, of those that were read last
        self.digests: tuple[str, ...] = ()  # of what is there; replaced, never changed
        self.num_bytes = 0
        self.num_loaded = 0

    def memory(self) -> AdapterMemory:
        """Where adapters are kept. Any thread may call it. Raises Unimplemented if none runs here."""
        if self._memory is None:
            raise Unimplemented(self._support.refusal or NO_LORA.refusal)
        if not self._max_bytes:
            raise Unimplemented("this worker has no memory for adapters: give it some with --adapter-bytes")
        return self._memory

    def support(self, *, stored_type: bool) -> LoraSupport:
        """Which adapters run here, as routers may know it. `stored_type`: numbers stay in the type of their file."""
        try:
            self.memory()
        except Unimplemented as error:
            return LoraSupport(refusal=error.message)
        return replace(self._support, max_bytes=self._max_bytes if stored_type else self.max_file_bytes)

    @property
    def max_file_bytes(self) -> int:
        """Of numbers in a file: those of four bytes may be kept in two."""
        return 2 * self._max_bytes

    def read(self, source: str, digest: str = "") -> ReadAdapter:
        """Reads an adapter, which takes its time. Any thread may call it.

        Raises NotFound, BadModel, TooLarge for one that never fits, and Unimplemented where no adapter runs.
        """
        adapter = self.memory().read(source, digest, self.max_file_bytes)
        if adapter.num_bytes > self._max_bytes:
            what = f"an adapter of {adapter.num_bytes} bytes does not fit {self._max_bytes}"
            raise TooLarge(f"{source}: {what}: give more with --adapter-bytes")
        return adapter

    def find(self, digest: str) -> int:
        """The number under which steps run with it; 0: it is not there. For an empty digest, too."""
        if digest not in self._there:
            return 0
        self._there.move_to_end(digest)
        return self._there[digest].number

    def has(self, number: int) -> bool:
        """Whether steps can run with it."""
        return any(kept.number == number for kept in self._there.values())

    def require_turn(self, digest: str) -> None:
        """Before a sequence begins. Raises NoAdapterRoom while its adapter makes room for another one."""
        if not digest or not self._claims:
            return
        if self._has_turn(digest):
            if digest in self._there:  # others have made the room
                self._claims.pop(digest, None)
            return
        self._note_claim(digest)
        first = next(iter(self._claims))
        raise NoAdapterRoom(f"adapter {digest} makes room for {first}, which has waited: place elsewhere, or retry")

    def _has_turn(self, digest: str) -> bool:
        now, first = time.monotonic(), self._next_turn()
        if first in ("", digest):
            return True
        missing = self.num_bytes + self._sizes.get(first, 0) - self._max_bytes
        for each, kept in sorted(self._there.items(), key=lambda entry: entry[1].since):
            had_turn = now - kept.since >= TURN_S
            if each == digest:
                return missing <= 0 or not had_turn
            missing -= kept.num_bytes if had_turn else 0
        return True

    def _next_turn(self) -> str:
        """The adapter that has waited longest, if that was as long as a turn; empty: none has."""
        now = time.monotonic()
        self._drop_claims(now)
        first = next(iter(self._claims), "")
        return first if first and now - self._claims[first].since >= TURN_S else ""

    def _note_claim(self, digest: str) -> None:
        now = time.monotonic()
        self._drop_claims(now)
        self._claims.setdefault(digest, Claim(now, now)).asked_at = now

    def _drop_claims(self, now: float) -> None:
        """Forgets those who have gone elsewhere."""
        self._claims = {each: claim for each, claim in self._claims.items() if now - claim.asked_at < CLAIM_S}

    def put(self, adapter: ReadAdapter) -> int:
        """Makes room for an adapter and keeps it. The same one again changes nothing.

        Raises NoAdapterRoom if what is in use leaves no room.
        """
        memory = self.memory()
        if number := self.find(adapter.digest):
            return number
        self._note_size(adapter)
        self._make_room(memory, adapter)
        number = memory.add(adapter)
        self._there[adapter.digest] = KeptAdapter(number, adapter.num_bytes, time.monotonic())
        self._claims.pop(adapter.digest, None)
        self.num_bytes += adapter.num_bytes
        self.num_loaded += 1
        self.digests = tuple(self._there)
        return number

    def require_room(self, digest: str) -> None:
        """Before an adapter is read that was read before. Raises NoAdapterRoom if what is in use leaves it no room."""
        self._idle_beside(digest, self._sizes.get(digest, 0))

    def _note_size(self, adapter: ReadAdapter) -> None:
        self._sizes[adapter.digest] = adapter.num_bytes
        self._sizes.move_to_end(adapter.digest)
        if len(self._sizes) > MAX_SIZES:
            self._sizes.popitem(last=False)

    def _idle_beside(self, wanted: str, num_bytes: int) -> list[tuple[str, KeptAdapter]]:
        """What may go for an adapter of so many bytes, the one first that was used longest ago."""
        used = self._in_use()
        idle = [(digest, kept) for digest, kept in self._there.items() if kept.number not in used]
        missing = self.num_bytes + num_bytes - self._max_bytes
        if (first := self._next_turn()) != wanted:
            missing += self._sizes.get(first, 0)  # its room is not for others
        if missing > sum(kept.num_bytes for _, kept in idle):
            self._note_claim(wanted)
            said = f"{self.num_bytes} of {self._max_bytes} bytes for adapters are in use"
            raise NoAdapterRoom(f"{said}, and this one wants {num_bytes}: place the sequence elsewhere")
        return idle

    def _make_room(self, memory: AdapterMemory, adapter: ReadAdapter) -> None:
        missing = self.num_bytes + adapter.num_bytes - self._max_bytes
        for digest, kept in self._idle_beside(adapter.digest, adapter.num_bytes):
            if missing <= 0:
                break
            memory.drop(kept.number)
            del self._there[digest]
            self.num_bytes -= kept.num_bytes
            missing -= kept.num_bytes
        self.digests = tuple(self._there)
