"""Sends prompts to workers, as many at a time as these can use, and sends again what a lost worker had.

Nothing of it is stored: whoever loses this router calls another one. A prompt that was with several workers when they
died is the next time alone with one, and is given up after that.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from octavo.process.loop import end_tasks
from octavo.request.errors import (
    Code,
    DeadlineExceeded,
    NoWorkers,
    PoisonSuspected,
    ServingError,
    TooLarge,
    Unreachable,
)
from octavo.request.ids import Incarnation
from octavo.wire.pooling import PromptVector
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import WorkerView
from router.placing.placement import choose_worker
from router.pooling.prompt_queue import PromptQueue, Turn, VectorCall, WaitingPrompt

log = logging.getLogger(__name__)

LOSSES_ALONE = (
    2  # so many lost workers make a prompt a suspect, which is sent to a worker that has nothing else of ours
)
MOST_LOSSES = 3
STEPS_AHEAD = 2  # a worker has prompts of so many steps, so that no step waits for this router
WITHOUT_WORKERS_S = 30.0  # how long a prompt waits for a worker where there is none, unless its call ends before
FORGIVEN_S = 1.0  # after which a prompt for which no other worker is there goes to one again that has failed it
DECLINED_S = 0.25  # how long a worker that had no room is not asked
ROUND_S = 0.1  # how often waiting prompts are looked at, if nothing happens
PRIORITY = 3


@dataclass(slots=True)
class WorkerShare:
    """What one worker has of this router's prompts."""

    num_prompts: int = 0
    num_tokens: int = 0
    alone: bool = False  # it has a suspect, and nothing else
    declined_until: float = 0.0


class VectorDispatcher:
    """Lives on the event loop."""

    def __init__(self, pool: WorkerPool, *, waits_for_workers: bool = False) -> None:
        self.num_vectors: Counter[str] = Counter()  # by model
        self.num_sent_again: Counter[str] = Counter()
        self.num_under_way = 0
        self._pool = pool
        self._waits_for_workers = waits_for_workers
        self._queue = PromptQueue()
        self._shares: defaultdict[Incarnation, WorkerShare] = defaultdict(WorkerShare)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def vectors(self, call: VectorCall, prompts: Sequence[list[int]]) -> list[PromptVector]:
        """What became of each prompt. Raises the failure of the first that has none, or DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        waiting = [WaitingPrompt(call, prompt, loop.create_future()) for prompt in prompts]
        for prompt in waiting:
            self._queue.add(prompt)
        self.num_under_way += len(waiting)
        try:
            async with asyncio.timeout(None if call.ends_at is None else call.ends_at - time.monotonic()):
                self._send_waiting()
                return await asyncio.gather(*(prompt.result for prompt in waiting))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before all vectors were there") from None
        finally:
            self.num_under_way -= len(waiting)
            self._let_go(call, waiting)

    def _let_go(self, call: VectorCall, prompts: Sequence[WaitingPrompt]) -> None:
        """Nobody waits for these prompts any more, which are those of the call."""
        for prompt in prompts:
            prompt.result.cancel()
        if any(prompt.result.cancelled() or prompt.result.exception() for prompt in prompts):
            self._queue.drop_done(call.turn)
        for task in list(call.tasks):
            task.cancel()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await end_tasks(list(self._tasks))

    # Sending

    def _send_waiting(self) -> None:
        """Sends what may be sent now: the prompts of one call to one worker travel together."""
        batches: dict[tuple[VectorCall, Incarnation, bool], list[WaitingPrompt]] = defaultdict(list)
        views: dict[str, list[WorkerView]] = {}
        stuck: set[Turn] = set()  # whose next prompts find no room
        for _ in range(len(self._queue)):
            turn = next((turn for turn in self._queue.turns() if turn not in stuck), None)
            if turn is None:
                break
            prompt = self._queue.head(turn)
            if prompt is None:
                continue
            name = prompt.call.model.name
            if name not in views:
                views[name] = self._pool.views(prompt.call.model)
            worker = self._choose(prompt, views[name])
            if worker is None:
                if not prompt.done:  # else it was given up
                    stuck.add(turn)
                continue
            self._queue.pop_head(turn)
            share, alone = self._shares[worker.incarnation], prompt.num_losses >= LOSSES_ALONE
            share.num_prompts += 1
            share.num_tokens += len(prompt.token_ids)
            share.alone |= alone
            batches[prompt.call, worker.incarnation, alone].append(prompt)
        for (call, incarnation, _), batch in batches.items():
            self._begin(call, incarnation, batch)
        if self._queue and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ROUND_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._send_waiting()

    def _choose(self, prompt: WaitingPrompt, views: list[WorkerView]) -> WorkerView | None:
        """The worker for a prompt. None: it waits, or was given up with a reason."""
        call, num_tokens, now = prompt.call, len(prompt.token_ids), time.monotonic()
        present = [view for view in views if view.stays and view.incarnation not in prompt.excluded]
        if not present:
            self._wait_for_worker(prompt, now)
            return None
        prompt.waits_since = None
        if not any(num_tokens < view.prompt_limit for view in present):
            limit = max(view.prompt_limit for view in present)
            refuse(prompt, TooLarge(f"{num_tokens} tokens: the largest worker holds fewer than {limit}"))
            return None
        same = [view for view in present if view.numerics == call.numerics] if call.numerics else present
        alone = prompt.num_losses >= LOSSES_ALONE
        free = [view for view in same or present if self._has_room(view, num_tokens, alone, now)]
        if not free:
            return None
        reads_blocks = len(free) > 1 and not call.params.needs_all_rows
        hits = self._pool.find_hits(call.model, prompt.token_ids, call.salt) if reads_blocks else {}
        chosen = choose_worker(num_tokens, hits, [self._with_ours(view) for view in free]).worker
        if chosen is not None:
            call.numerics = call.numerics or chosen.numerics
        return chosen

    def _with_ours(self, view: WorkerView) -> WorkerView:
        """The worker, with our prompts that its last report cannot have: those count once more, which does no harm."""
        share = self._shares[view.incarnation]
        return replace(view, dispatched_tokens=view.dispatched_tokens + share.num_tokens)

    def _has_room(self, view: WorkerView, num_tokens: int, alone: bool, now: float) -> bool:
        share, link = self._shares[view.incarnation], self._pool.find_link(view.incarnation)
        if not view.available or link is None or link.facts is None or share.alone or now < share.declined_until:
            return False
        if not share.num_prompts:
            return True
        room = STEPS_AHEAD * link.facts.max_batch_tokens
        return not alone and share.num_prompts < view.max_batch_sequences and share.num_tokens + num_tokens <= room

    def _wait_for_worker(self, prompt: WaitingPrompt, now: float) -> None:
        prompt.waits_since = prompt.waits_since or now
        if now - prompt.waits_since > FORGIVEN_S:
            prompt.excluded.clear()
        patience_s = float("inf") if self._waits_for_workers else WITHOUT_WORKERS_S
        if now - prompt.waits_since > patience_s:
            refuse(prompt, NoWorkers(f"no worker serves {prompt.call.model.name} now: retry", retry_after_ms=500))

    def _begin(self, call: VectorCall, incarnation: Incarnation, batch: list[WaitingPrompt]) -> None:
        left = dict(enumerate(batch))
        task = asyncio.create_task(self._run(call, incarnation, batch, left))
        for tasks in (self._tasks, call.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: self._settle(incarnation, left))  # even if it is cancelled before it begins

    def _settle(self, incarnation: Incarnation, left: dict[int, WaitingPrompt]) -> None:
        """Takes what a call to a worker has left out of the worker's share."""
        share = self._shares[incarnation]
        for prompt in left.values():
            self._give_back(share, prompt)
        if not share.num_prompts:
            share.alone = False
            if time.monotonic() >= share.declined_until:
                del self._shares[incarnation]
        self._send_waiting()

    # One call to a worker

    async def _run(
        self, call: VectorCall, incarnation: Incarnation, batch: list[WaitingPrompt], left: dict[int, WaitingPrompt]
    ) -> None:
        """Sends a batch, and sends again or refuses what it has in `left` when the call to the worker ends."""
        try:
            link = self._pool.find_link(incarnation)
            if link is None:
                raise Unreachable("the worker is gone")
            await self._read(call, link, batch, left)
            if left:
                raise Unreachable(f"worker {link.worker_id} ended the call before all vectors were there")
        except ServingError as error:
            self._send_again(list(left.values()), incarnation, error)
        except Exception as error:
            log.exception("the vectors of worker %s could not be read", incarnation)
            unread = f"a worker's vectors could not be read: {type(error).__name__}; see the router's log"
            for prompt in left.values():
                refuse(prompt, ServingError(unread))

    async def _read(
        self, call: VectorCall, link: WorkerLink, batch: list[WaitingPrompt], left: dict[int, WaitingPrompt]
    ) -> None:
        """Hands out vectors as they come, and takes their prompts out of `left`. Raises what ends the call before."""
        remaining_s = 0.0 if call.ends_at is None else max(0.001, call.ends_at - time.monotonic())
        stream = link.pool(
            [prompt.token_ids for prompt in batch],
            call.params,
            salt=call.salt,
            priority=PRIORITY,
            deadline_in_ms=int(remaining_s * 1000) + bool(remaining_s),
        )
        watch = asyncio.create_task(link.gone.wait())
        reading = asyncio.create_task(self._hand_out(stream, link.incarnation, left))
        try:
            await asyncio.wait((watch, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise Unreachable(f"worker {link.worker_id} is lost: it has no lease")
            reading.result()
        finally:
            await end_tasks([watch, reading])

    async def _hand_out(
        self, stream: AsyncGenerator[list[PromptVector], None], worker: Incarnation, left: dict[int, WaitingPrompt]
    ) -> None:
        share = self._shares[worker]
        async with aclosing(stream):
            async for vectors in stream:
                for vector in vectors:
                    prompt = left.pop(vector.index)
                    self._give_back(share, prompt)
                    if vector.failure is not None and vector.failure.retryable:
                        self._send_again([prompt], worker, vector.failure.error())
                    elif vector.failure is not None:
                        refuse(prompt, vector.failure.error())
                    elif not prompt.done:
                        self.num_vectors[prompt.call.model.name] += 1
                        prompt.result.set_result(vector)
                self._send_waiting()

    def _give_back(self, share: WorkerShare, prompt: WaitingPrompt) -> None:
        share.num_prompts -= 1
        share.num_tokens -= len(prompt.token_ids)

    def _send_again(self, prompts: Sequence[WaitingPrompt], worker: Incarnation, error: ServingError) -> None:
        """Puts prompts before all others of their tenant. Only an error that another worker may not have comes here."""
        if not error.retryable:
            for prompt in prompts:
                refuse(prompt, error)
            return
        if error.code is Code.RESOURCE_EXHAUSTED:
            self._shares[worker].declined_until = time.monotonic() + DECLINED_S
        for prompt in reversed(prompts):
            if isinstance(error, Unreachable):
                prompt.num_losses += 1
            if prompt.num_losses >= MOST_LOSSES:
                refuse(prompt, PoisonSuspected(f"{MOST_LOSSES} workers died or were lost while they had this prompt"))
            if error.code is not Code.RESOURCE_EXHAUSTED:
                prompt.excluded.add(worker)
            if not prompt.done:
                self.num_sent_again[prompt.call.model.name] += 1
                self._queue.add(prompt, first=True)


def refuse(prompt: WaitingPrompt, error: ServingError) -> None:
    """Ends the waiting for a prompt with an error."""
    if not prompt.done:
        prompt.result.set_exception(error)
