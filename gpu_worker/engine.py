"""The step loop: plan, run, commit, hand over. One thread owns the scheduler and the runner; others post commands to it.

A command runs between two steps, so it never sees a step half done. The loop reports progress after each step and each
idle round: the lease and health follow that, so a hung engine loses both although its process lives.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gpu_worker.plan import Runner, StepOutput
from gpu_worker.results import StepResult
from gpu_worker.scheduler import Scheduler
from octavo.errors import ServingError

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_ROUND_S = 0.25  # how often an idle loop reports progress
BLOCKED_ROUND_S = 0.005
CHECK_EVERY_S = 10.0  # how often an idle loop recounts its blocks


class RunnerFailed(ServingError):
    """A step of the model failed; the sequences in it could not be continued here."""

    reason = "RUNNER_FAILED"
    retryable = True


@dataclass(slots=True)
class StepTimes:
    """Seconds the last steps took, smoothed; what Load.step_ms and the cost model are made of."""

    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    prefill_tokens_per_s: float = 0.0

    def add(self, plan_s: float, run_s: float, commit_s: float, num_tokens: int, num_branches: int) -> None:
        weight = 0.1 if self.num_steps else 1.0
        self.plan_s += weight * (plan_s - self.plan_s)
        self.run_s += weight * (run_s - self.run_s)
        self.commit_s += weight * (commit_s - self.commit_s)
        self.num_steps += 1
        self.num_tokens += num_tokens
        if num_tokens >= 32 and num_tokens > 2 * num_branches and run_s > 0:  # mostly prompt
            rate = num_tokens / run_s
            self.prefill_tokens_per_s += (0.2 if self.prefill_tokens_per_s else 1.0) * (rate - self.prefill_tokens_per_s)

    @property
    def step_s(self) -> float:
        return self.plan_s + self.run_s + self.commit_s


class Engine:
    """Runs steps while it is granted, has work, and is not held back by the journal."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_result: Callable[[StepResult], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.times = StepTimes()
        self._on_result = on_result
        self._on_progress = on_progress
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._granted = 0  # finite steps left
        self._unlimited = False
        self._held = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._checked = time.monotonic()
        self.last_progress = time.monotonic()
        self.crashed = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends after the step in flight."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # What other threads may call

    def post(self, command: Callable[[Scheduler], T]) -> "Future[T]":
        """Runs a command between two steps and returns its result or error."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self.scheduler))
            except Exception as error:  # the caller gets it, whatever it is
                future.set_exception(error)

        self._commands.append(run)
        self._wake.set()
        return future

    def grant(self, steps: int) -> None:
        """Allows `steps` more steps; 0 is until `pause`."""
        if steps:
            self._granted += steps
        else:
            self._unlimited = True
        self._wake.set()

    def pause(self) -> None:
        """Takes all grants back: no step begins after this."""
        self._unlimited = False
        self._granted = 0

    def hold(self, held: bool) -> None:
        """Keeps steps from beginning while the journal is too far behind."""
        self._held = held
        self._wake.set()

    # The loop

    def step(self) -> StepResult:
        """One forward pass over whoever runs now."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        try:
            output = StepOutput([]) if plan.empty else self.runner.run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step_id)
            failure = RunnerFailed(f"the model failed in a step: {type(error).__name__}: {error}").failure()
            return self.scheduler.abort_step(plan, failure.to_json())
        ran = time.perf_counter()
        result = self.scheduler.commit(plan, output)
        self.times.add(planned - began, ran - planned, time.perf_counter() - ran, plan.num_tokens, len(plan.chunks))
        return result

    def _loop(self) -> None:
        try:
            self._rounds()
        except Exception:
            log.exception("the step loop has ended; nothing runs here any more")
            self.crashed = True

    def _rounds(self) -> None:
        while not self._stopping:
            while self._commands:
                self._commands.popleft()()
            if self._may_step():
                result = self.step()
                self._on_result(result)
                if not result.num_tokens:
                    self._wake.wait(BLOCKED_ROUND_S)  # whoever is there has to wait for time to pass
            else:
                self._idle()
            self.last_progress = time.monotonic()
            self._on_progress()

    def _may_step(self) -> bool:
        if self._held:
            return False
        if self._granted:  # a counted step runs, and is reported, even when there is nothing to do
            self._granted -= 1
            return True
        return self._unlimited and self.scheduler.has_work

    def _idle(self) -> None:
        now = time.monotonic()
        if not self.scheduler.has_work and now - self._checked > CHECK_EVERY_S:
            self._checked = now
            self.scheduler.check()
        self._wake.wait(IDLE_ROUND_S)
        self._wake.clear()
