"""The one way into the engine's thread: commands that other threads post, and who may use the scheduler when.

A command runs between two steps, so it never sees a step half done. A *block command* changes no sequence: it pins,
holds or gives back blocks, or only looks. It also runs while the runner is busy with a step, if that step copies no
block, or has made its copies: the loop lends the scheduler out for so long, to one thread at a time. So migrations do
not wait for steps.
`LoopControl` says whether the next step may begin: by finite grants, by the unlimited one, and unless it is held.
"""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.step import SubscriptionId
from octavo.request.errors import Draining, ServingError

T = TypeVar("T")
Command = Callable[[Scheduler], Any]
log = logging.getLogger(__name__)

MAX_COMMANDS_BETWEEN_STEPS = 16  # block commands that the loop runs at a time, while more may wait


class CommandPort:
    """Commands that wait for their turn with the scheduler. It is there before the engine that runs them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._commands: deque[tuple[Future[Any], Command]] = deque()
        self._block_commands: deque[tuple[Future[Any], Command]] = deque()
        self._lock = threading.Lock()  # of the thread that uses the scheduler now
        self._loop_wants_it = False
        self._ended = False
        self.wake = threading.Event()  # ends the wait of an idle loop

    # What any thread may call

    def post(self, command: Callable[[Scheduler], T]) -> "Future[T]":
        """Runs a command between two steps, in the order posted. The future has its result or error.

        The error is Draining if the loop ended before the command's turn.
        """
        future: Future[T] = Future()
        self._commands.append((future, command))
        self.wake.set()
        if self._ended:
            self._refuse_commands()
        return future

    def post_block(self, command: Callable[[Scheduler], T]) -> "Future[T]":
        """Runs a block command as soon as no other thread uses the scheduler: often on this thread, at once.

        Block commands run in the order posted, and may overtake other commands. The error is as for `post`.
        """
        future: Future[T] = Future()
        self._block_commands.append((future, command))
        self._run_block_commands()
        return future

    def tell(self, command: Callable[[Scheduler], object]) -> None:
        """Posts a command of which nobody waits for the result."""
        self.post(command).add_done_callback(log_failure)

    async def ask(self, command: Callable[[Scheduler], T]) -> T:
        """What a command returns."""
        return await asyncio.wrap_future(self.post(command))

    # What the loop calls

    @contextmanager
    def using_scheduler(self) -> Iterator[None]:
        """No other thread uses the scheduler inside. Block commands that came meanwhile run at the end."""
        self._get_scheduler()
        try:
            yield
        finally:
            self._lock.release()
        self._run_block_commands(MAX_COMMANDS_BETWEEN_STEPS)
        if self._block_commands:
            self.wake.set()

    @contextmanager
    def lending_scheduler(self) -> Iterator[None]:
        """Within `using_scheduler`: lets block commands run meanwhile."""
        self._lock.release()
        try:
            self._run_block_commands(MAX_COMMANDS_BETWEEN_STEPS)
            yield
        finally:
            self._get_scheduler()

    def run_commands(self) -> None:
        """Within `using_scheduler`: runs the commands that are there."""
        while self._commands:
            run_command(*self._commands.popleft(), self._scheduler)

    def close(self) -> None:
        """Answers every command that is there, or comes later, with Draining."""
        self._ended = True
        self._refuse_commands()

    def _get_scheduler(self) -> None:
        """The loop comes before all who post block commands, however many they post."""
        self._loop_wants_it = True
        self._lock.acquire()
        self._loop_wants_it = False

    def _run_block_commands(self, most: float = math.inf) -> None:
        """Runs what is there, unless another thread uses the scheduler: that one does it afterwards.

        The loop runs `most` of them at a time. Commands that came without end would keep it from its steps; it leaves
        them to the threads that post them.
        """
        while most > 0 and self._block_commands and not self._loop_wants_it:
            if not self._lock.acquire(blocking=False):
                return
            try:
                while most > 0 and self._block_commands and not (self._ended or self._loop_wants_it):
                    most -= 1
                    run_command(*self._block_commands.popleft(), self._scheduler)
            finally:
                self._lock.release()
            if self._ended:
                self._refuse_commands()

    def _refuse_commands(self) -> None:
        while True:
            try:
                future, _ = (self._commands or self._block_commands).popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(Draining("the step loop has ended: place elsewhere"))


def run_command(future: "Future[Any]", command: Command, scheduler: Scheduler) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command(scheduler))
    except Exception as error:  # whoever has posted the command gets it, whatever it is
        future.set_exception(error)


def log_failure(future: "Future[Any]") -> None:
    if future.cancelled() or not (error := future.exception()):
        return
    if not isinstance(error, ServingError):  # e.g. Draining: the engine has ended, and so have its sequences
        log.error("a command to the engine failed", exc_info=error)


@dataclass(slots=True, eq=False)
class Grant:
    """Steps that a subscription allowed. `UNLIMITED` stands for the grant without an end."""

    subscription_id: SubscriptionId | None
    steps: int


UNLIMITED = Grant(None, 0)


class LoopControl:
    """Lets the loop run as many steps as finite grants allow, and under the unlimited grant while there is work."""

    def __init__(self, port: CommandPort) -> None:
        self._port = port
        self._grants: deque[Grant] = deque()  # the engine's thread alone uses these and _unlimited
        self._unlimited = False
        self._held = False

    # What other threads may call

    def grant_steps(self, steps: int, subscription_id: SubscriptionId | None = None) -> None:
        """Allows `steps` more steps; 0 is the unlimited grant, which lasts until `pause`.

        The result of a step under a finite grant names `subscription_id`.
        """

        def command(_: Scheduler) -> None:
            if steps:
                self._grants.append(Grant(subscription_id, steps))
            else:
                self._unlimited = True

        self._port.post(command)

    def pause(self) -> "Future[list[Grant]]":
        """Takes all grants back, whichever subscription gave them; no step begins after that.

        The future has what was left of the finite ones.
        """

        def command(_: Scheduler) -> list[Grant]:
            left = list(self._grants)
            self._grants.clear()
            self._unlimited = False
            return left

        return self._port.post(command)

    def hold_steps(self, held: bool) -> None:
        """Keeps steps from beginning while `held` is true, because the journal writer is too far behind."""
        self._held = held
        self._port.wake.set()

    # What the loop calls

    def next_grant(self, *, has_work: bool) -> Grant | None:
        """The grant that allows the next step; None if there is none. An empty step uses up a finite grant, too."""
        if self._held:
            return None
        if self._grants:
            grant = self._grants[0]
            grant.steps -= 1
            if not grant.steps:
                self._grants.popleft()
            return grant
        return UNLIMITED if self._unlimited and has_work else None
