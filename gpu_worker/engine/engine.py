"""The step loop: plan, run, commit, hand over. One thread owns scheduler and runner; other threads post commands to it.

A command runs between two steps, so it never sees a step half done. The loop reports progress after each step and each
idle round. Lease and health follow this progress, so an engine that hangs loses both although its process lives.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.step import Runner, StepDeltas, StepOutput, SubscriptionId
from octavo.errors import Draining, RunnerFailed

T = TypeVar("T")
Command = Callable[[Scheduler], Any]
log = logging.getLogger(__name__)

IDLE_ROUND_S = 0.25  # how often an idle loop reports progress
BLOCKED_ROUND_S = 0.005  # how long it waits when every sequence can only wait
CHECK_EVERY_S = 10.0  # how often an idle loop recounts its blocks
STOP_TIMEOUT_S = 10.0  # how long `stop` waits for the step in flight


@dataclass(slots=True, eq=False)
class Grant:
    """Steps that a subscription allowed. `UNLIMITED` stands for the grant without an end."""

    subscription_id: SubscriptionId | None
    steps: int


UNLIMITED = Grant(None, 0)


class Engine:
    """Runs steps unless the journal writer holds them: as many as finite grants allow, whether there is work or not,
    and under the unlimited grant while there is work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        times: StepTimes,
        on_deltas: Callable[[StepDeltas], None],
        on_progress: Callable[[], None] = lambda: None,
        idle_round_s: float = IDLE_ROUND_S,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.times = times
        self._on_deltas = on_deltas
        self._on_progress = on_progress
        self._idle_round_s = idle_round_s
        self._commands: deque[tuple[Future[Any], Command]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._ended = False
        self._grants: deque[Grant] = deque()  # the engine's thread alone uses these and _unlimited
        self._unlimited = False
        self._held = False
        self._blocked = False  # the last step had nothing it could run
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._checked = time.monotonic()
        self.last_progress = time.monotonic()
        self.crashed = False

    def start(self) -> None:
        """Begins the loop in a thread of its own."""
        self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ends the loop after the step in flight. False if that step still runs after `timeout_s`, on the runner."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # What other threads may call

    def post_command(self, command: Callable[[Scheduler], T]) -> "Future[T]":
        """Runs a command between two steps, in the order posted. The future has its result or error.

        The error is Draining if the loop ended before the command's turn.
        """
        future: Future[T] = Future()
        self._commands.append((future, command))
        self._wake.set()
        if self._ended:
            self._refuse_commands()
        return future

    def grant_steps(self, steps: int, subscription_id: SubscriptionId | None = None) -> None:
        """Allows `steps` more steps; 0 is the unlimited grant, which lasts until `pause`.

        The deltas of a step under a finite grant name `subscription_id`.
        """

        def command(_: Scheduler) -> None:
            if steps:
                self._grants.append(Grant(subscription_id, steps))
            else:
                self._unlimited = True

        self.post_command(command)

    def pause(self) -> "Future[list[Grant]]":
        """Takes all grants back, whichever subscription gave them; no step begins after that.

        The future has what was left of the finite ones.
        """

        def command(_: Scheduler) -> list[Grant]:
            left = list(self._grants)
            self._grants.clear()
            self._unlimited = False
            return left

        return self.post_command(command)

    def hold_steps(self, held: bool) -> None:
        """Keeps steps from beginning while `held` is true, because the journal writer is too far behind."""
        self._held = held
        self._wake.set()

    # The loop

    def step(self) -> StepDeltas:
        """Runs one step. The caller must be the only thread that uses the scheduler.

        If the runner raises, the step is aborted: its sequences are computed again, each alone, and one that fails
        alone ends with RUNNER_FAILED.
        """
        began = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        self._blocked = plan.empty
        try:
            output = StepOutput([]) if plan.empty else self._runner.run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step_id)
            failure = RunnerFailed(f"the model failed in a step: {type(error).__name__}: {error}").failure()
            return self._scheduler.abort_step(plan, failure.to_json())
        ran = time.perf_counter()
        self.times.observe_costs(plan, output, ran - planned)
        result = self._scheduler.commit(plan, output)
        self.times.count_step(time.perf_counter() - began, result.num_tokens)
        return result

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception:
            log.exception("the step loop has ended; nothing runs here any more")
            self.crashed = True
        finally:
            self._ended = True
            self._refuse_commands()

    def _round(self) -> None:
        self._wake.clear()  # a command posted from here on is seen below, or ends the wait
        while self._commands:
            run_command(*self._commands.popleft(), self._scheduler)
        grant = self._next_grant()
        if grant is None:
            self._idle()
        else:
            result = self.step()
            result.granted_by = grant.subscription_id
            if result.deltas or grant is not UNLIMITED:  # a finite grant's steps are reported even if they are empty
                self._on_deltas(result)
            if self._blocked and not result.deltas:
                self._wake.wait(BLOCKED_ROUND_S)  # until time has passed or a command comes
        self.last_progress = time.monotonic()
        self._on_progress()

    def _next_grant(self) -> Grant | None:
        """The grant that allows the next step; None if there is none. An empty step uses up a finite grant, too."""
        if self._held:
            return None
        if self._grants:
            grant = self._grants[0]
            grant.steps -= 1
            if not grant.steps:
                self._grants.popleft()
            return grant
        return UNLIMITED if self._unlimited and self._scheduler.has_work else None

    def _idle(self) -> None:
        now = time.monotonic()
        if not self._scheduler.has_work and now - self._checked > CHECK_EVERY_S:
            self._checked = now
            self._scheduler.check_state()
        self._wake.wait(self._idle_round_s)

    def _refuse_commands(self) -> None:
        """Answers every command that is still there with Draining, so that no caller waits for ever."""
        while True:
            try:
                future, _ = self._commands.popleft()
            except IndexError:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(Draining("the step loop has ended: place elsewhere"))


def run_command(future: "Future[Any]", command: Command, scheduler: Scheduler) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(command(scheduler))
    except Exception as error:  # the caller of `post_command` gets it, whatever it is
        future.set_exception(error)
