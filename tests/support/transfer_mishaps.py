"""What may happen to calls of Transfer between two workers: answers are lost, calls come twice, messages are changed.

An answer is lost as a broken connection loses it: the call was carried out, and its caller gets UNAVAILABLE. A call
that comes twice comes at the same time, or after the answer to the first.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from waiting import until
from worker_pair import CountingRunner

from gpu_worker.migration.transfer_service import TransferService
from octavo.process import failpoints
from octavo.request.errors import ServingError

KINDS = ["lost", "twice at once", "twice, late"]


class Mishap:
    """What happens to the first `times` calls of one method, of workers that start after this. `late` is still to come.

    `change` may change each request and each answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, what: str = "", times: int = 1) -> None:
        self.num_calls = 0
        self.late: list[Callable[[], Awaitable[object]]] = []
        self.change: Callable[[Any], object] = lambda message: None
        self._what, self._times = what, times
        self._handler = getattr(TransferService, method)
        handle = self._handle

        async def handled(service: TransferService, request: Any, context: Any) -> Any:
            return await handle(service, request, context)

        monkeypatch.setattr(TransferService, method, handled)

    async def _handle(self, service: TransferService, request: Any, context: Any) -> Any:
        self.num_calls += 1
        what = self._what if self.num_calls <= self._times else ""
        self.change(request)
        if what == "twice at once":
            answers = [self._handler(service, request, context) for _ in range(2)]
            return (await asyncio.gather(*answers))[0]
        answer = await self._handler(service, request, context)
        self.change(answer)
        if what == "lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        elif what:
            self.late.append(lambda: self._handler(service, request, context))
        return answer

    async def come_late(self) -> list[ServingError]:
        """Carries the repetitions out. Returns what they were refused with."""
        found = await asyncio.gather(*(again() for again in self.late), return_exceptions=True)
        refusals = [each for each in found if isinstance(each, BaseException)]
        assert all(isinstance(each, ServingError) for each in refusals), refusals
        return refusals


def run_on_at(place: str, runner: CountingRunner, num_steps: int) -> None:
    """When a migration first comes to a failpoint, so many steps pass, in which blocks become full."""
    began: list[int] = []

    async def wait() -> None:
        began.append(runner.num_steps)
        await until(lambda: runner.num_steps >= began[0] + num_steps)

    failpoints.arm(place, wait)
