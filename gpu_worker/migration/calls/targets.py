"""Which other workers may take a sequence, by what they say of themselves in the store."""

import json
import time
from dataclasses import dataclass
from typing import Any

from octavo.request.errors import NotFound
from octavo.request.ids import Incarnation
from octavo.request.record import WorkerRole
from octavo.store.base import Store
from octavo.store.calls import Member
from octavo.wire.endpoint import Endpoint, parse_endpoint

FOUND_S = 10.0  # how long a worker that was found is known


@dataclass(frozen=True, slots=True)
class TargetWorker:
    """A worker that a sequence may move to, and where that worker is called."""

    incarnation: Incarnation
    endpoint: Endpoint
    for_prompts: bool = False  # and for outputs only where there is no other


class TargetPool:
    """The other workers that serve the same model, as the store knows them."""

    def __init__(
        self, store: Store, own: Incarnation, fingerprint: str, layout: str, numerics: str = "", worker_id: str = ""
    ) -> None:
        """A worker that has our `worker_id` is what we were before we started again, and dead."""
        self._store = store
        self._own, self._worker_id = own, worker_id
        self._fingerprint, self._layout, self._numerics = fingerprint, layout, numerics
        self._found: dict[Incarnation, tuple[TargetWorker, float]] = {}  # and when
        self._turns: dict[Incarnation, int] = {}  # when each was chosen last, counted in choices
        self._num_choices = 0

    async def find(self, incarnation: Incarnation) -> TargetWorker:
        """The worker of this incarnation, whatever it serves: it says itself what it cannot take. Raises NotFound.

        It is called at one address for its life, so the store is not asked again for a while.
        """
        now = time.monotonic()
        self._found = {each: found for each, found in self._found.items() if now - found[1] < FOUND_S}
        if incarnation in self._found:
            return self._found[incarnation][0]
        for member in await self._store.members("worker"):
            if member.id == incarnation and (target := target_of(member)):
                self._found[incarnation] = target, now
                return target
        text = f"target: the store knows no live worker of the incarnation {incarnation}"
        raise NotFound(text, resource="worker", name=incarnation)

    async def candidates(self) -> list[TargetWorker]:
        """The workers of the same class of numerics, as far as they name it.

        The worker that was chosen longest ago comes first. Workers for prompts come last.
        """
        found = [
            target
            for member in await self._take_over()
            if str(info_of(member).get("numerics", "")) == self._numerics and (target := target_of(member))
        ]
        self._turns = {target.incarnation: self._turns.get(target.incarnation, 0) for target in found}
        return sorted(found, key=lambda target: (target.for_prompts, self._turns[target.incarnation]))

    async def count(self) -> int:
        """How many other workers serve this model and do not drain, of whatever class."""
        return len(await self._take_over())

    def note_choice(self, target: TargetWorker) -> None:
        """Puts a worker behind all others."""
        self._num_choices += 1
        self._turns[target.incarnation] = self._num_choices

    async def _take_over(self) -> list[Member]:
        members = await self._store.members("worker")
        return [each for each in members if not self._is_own(each) and self._has_model(info_of(each))]

    def _is_own(self, member: Member) -> bool:
        named = bool(self._worker_id) and info_of(member).get("worker_id") == self._worker_id
        return named or member.id == self._own

    def _has_model(self, info: dict[str, Any]) -> bool:
        """Whether a worker can run sequences of this model, as far as it says. One that says nothing of it may."""
        theirs = info.get("fingerprint", self._fingerprint), info.get("layout", self._layout)
        return theirs == (self._fingerprint, self._layout) and not info.get("draining", False)


def info_of(member: Member) -> dict[str, Any]:
    """What a worker says of itself. A worker of which that cannot be read drains, so nothing goes there."""
    try:
        info = json.loads(member.info)
    except ValueError:
        info = None
    return info if isinstance(info, dict) else {"draining": True}


def target_of(member: Member) -> TargetWorker | None:
    """A member as a target; None if it does not say where it is called."""
    info = info_of(member)
    for_prompts = info.get("role", WorkerRole.BOTH) == WorkerRole.PREFILL
    try:
        return TargetWorker(member.id, parse_endpoint(str(info["endpoint"])), for_prompts)
    except (LookupError, ValueError):
        return None
