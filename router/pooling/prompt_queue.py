"""Prompts that wait for a worker, in turn by tenant: whose prompts have had the fewest tokens sent comes first."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from octavo.pooling.params import PoolingParams
from octavo.request.ids import Incarnation
from octavo.wire.pooling import PromptVector
from router.fleet.model_registry import ServedModel

Turn = tuple[str, str]  # a tenant and a model


@dataclass(slots=True, eq=False)
class VectorCall:
    """What the prompts of one client's call have in common."""

    model: ServedModel
    params: PoolingParams
    tenant: str
    salt: str
    ends_at: float | None = None  # on the monotonic clock
    numerics: str = ""  # the class in which its first prompt was placed
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)  # calls to workers

    @property
    def turn(self) -> Turn:
        return self.tenant, self.model.name


@dataclass(slots=True, eq=False)
class WaitingPrompt:
    """One prompt of a call, from when the call comes in until its vector is there."""

    call: VectorCall
    token_ids: list[int]
    result: "asyncio.Future[PromptVector]"
    excluded: set[Incarnation] = field(default_factory=set)  # workers that it is not sent to again
    num_losses: int = 0  # workers that died while they had it
    waits_since: float | None = None  # when no worker was there for it

    @property
    def done(self) -> bool:
        return self.result.done()


class PromptQueue:
    """The prompts of all calls, those of each tenant for each model in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[Turn, deque[WaitingPrompt]] = {}
        self._served: dict[Turn, int] = {}  # tokens, of those who have prompts here

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, prompt: WaitingPrompt, *, first: bool = False) -> None:
        """Who comes back begins where that one stands that has had least."""
        turn = prompt.call.turn
        if turn not in self._waiting:
            self._waiting[turn] = deque()
            self._served[turn] = min(self._served.values(), default=0)
        queue = self._waiting[turn]
        (queue.appendleft if first else queue.append)(prompt)

    def turns(self) -> list[Turn]:
        """Whose prompts wait, in the order in which they come."""
        return sorted(self._waiting, key=lambda turn: self._served[turn])

    def head(self, turn: Turn) -> WaitingPrompt | None:
        """The first prompt that somebody still waits for."""
        queue = self._waiting.get(turn)
        while queue and queue[0].done:
            queue.popleft()
        if not queue:
            self._forget(turn)
            return None
        return queue[0]

    def pop_head(self, turn: Turn) -> WaitingPrompt:
        """Takes the first prompt out, and counts its tokens."""
        prompt = self._waiting[turn].popleft()
        self._served[turn] += len(prompt.token_ids)
        if not self._waiting[turn]:
            self._forget(turn)
        return prompt

    def drop_done(self, turn: Turn) -> None:
        """Lets go of the prompts for which nobody waits any more, wherever in the queue they are."""
        queue = deque(prompt for prompt in self._waiting.get(turn, ()) if not prompt.done)
        if queue:
            self._waiting[turn] = queue
        else:
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        self._waiting.pop(turn, None)
        self._served.pop(turn, None)
