"""The step loop: plan, run, commit, hand over. Its thread owns the runner; other threads post commands to it.

A command runs between two steps, so it never sees a step half done. A *block command* changes no sequence: it pins,
holds or gives back blocks, or only looks. It also runs while the runner is busy with a step, if that step copies no
block: the loop lends the scheduler out for so long, to one thread at a time. So migrations do not wait for steps. The
loop reports progress after each step and each idle round. Lease and health follow this progress, so an engine that
hangs loses both although its process lives.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.step import StepDeltas, SubscriptionId, SwapAnswer, SwapOperation
from gpu_worker.steps.runner import Runner, StepOutput
from gpu_worker.steps.step_input import StepInput
from octavo.request.errors import Draining, RunnerFailed
from octavo.request.ids import SequenceId

T = TypeVar("T")
Command = Callable[[Scheduler], Any]
log = logging.getLogger(__name__)

IDLE_ROUND_S = 0.25  # how often an idle loop reports progress
BLOCKED_ROUND_S = 0.005  # how long it waits when every sequence can only wait
CHECK_EVERY_S = 10.0  # how often an idle loop recounts its blocks
MAX_COMMANDS_BETWEEN_STEPS = 16  # block commands that the loop runs at a time, while more may wait
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
        self._block_commands: deque[tuple[Future[Any], Command]] = deque()
        self._scheduler_lock = threading.Lock()  # of the thread that uses the scheduler now
        self._wants_scheduler = False  # the loop waits for it
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
        """Begins the loop in a thread of its own. May be called again."""
        if self._thread.ident is None:
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

    def post_block_command(self, command: Callable[[Scheduler], T]) -> "Future[T]":
        """Runs a block command as soon as no other thread uses the scheduler: often on this thread, at once.

        Block commands run in the order posted, and may overtake other commands. The error is as for `post_command`.
        """
        future: Future[T] = Future()
        self._block_commands.append((future, command))
        self._run_block_commands()
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

    def swap(self, seq_id: SequenceId, epoch: int, operation: SwapOperation) -> "Future[SwapAnswer]":
        """Moves a sequence's blocks on request, between two steps: the copies are done when the future has its answer.

        No grant is used up. The error is what `Scheduler.swap` raises, or RunnerFailed if the copies failed: then the
        blocks are lost, and the sequence is computed again.
        """

        def command(scheduler: Scheduler) -> SwapAnswer:
            return self._copy_blocks(scheduler.swap(seq_id, epoch, operation))

        return self.post_command(command)

    # The loop

    @contextmanager
    def _using_scheduler(self) -> Iterator[None]:
        """No other thread uses the scheduler inside. Block commands that came meanwhile run at the end."""
        self._get_scheduler()
        try:
            yield
        finally:
            self._scheduler_lock.release()
        self._run_block_commands(MAX_COMMANDS_BETWEEN_STEPS)
        if self._block_commands:
            self._wake.set()

    @contextmanager
    def _lending_scheduler(self) -> Iterator[None]:
        """Within `_using_scheduler`: lets block commands run meanwhile."""
        self._scheduler_lock.release()
        try:
            self._run_block_commands(MAX_COMMANDS_BETWEEN_STEPS)
            yield
        finally:
            self._get_scheduler()

    def _get_scheduler(self) -> None:
        """The loop comes before all who post block commands, however many they post."""
        self._wants_scheduler = True
        self._scheduler_lock.acquire()
        self._wants_scheduler = False

    def _run_block_commands(self, most: float = math.inf) -> None:
        """Runs what is there, unless another thread uses the scheduler: that one does it afterwards.

        The loop runs `most` of them at a time. Commands that came without end would keep it from its steps; it leaves
        them to the threads that post them.
        """
        while most > 0 and self._block_commands and not self._wants_scheduler:
            if not self._scheduler_lock.acquire(blocking=False):
                return
            try:
                while most > 0 and self._block_commands and not (self._ended or self._wants_scheduler):
                    most -= 1
                    run_command(*self._block_commands.popleft(), self._scheduler)
            finally:
                self._scheduler_lock.release()
            if self._ended:
                self._refuse_commands()

    def _copy_blocks(self, num_blocks: int) -> SwapAnswer:
        """Makes the copies that a swap of `num_blocks` has decided."""
        plan = self._scheduler.plan_moves()
        if plan is None:
            return SwapAnswer(num_blocks)
        began = time.perf_counter()
        try:
            output = self._runner.run(plan.input)
        except Exception as error:
            log.exception("copies to or from the host pool failed")
            self._scheduler.end_moves(plan, failed=True)
            raise RunnerFailed(f"the copies failed, and the sequence is computed again: {error}") from error
        copy_s = output.copy_s or time.perf_counter() - began
        self._scheduler.end_moves(plan)
        num_bytes = (len(plan.input.swap_out) + len(plan.input.swap_in)) * self._runner.info.bytes_per_block
        return SwapAnswer(num_blocks, num_bytes, copy_s)

    def step(self) -> StepDeltas:
        """Runs one step. The caller must be the only thread that runs steps.

        If the runner raises, the step is aborted: its sequences are computed again, each by itself, and one that fails
        alone ends with RUNNER_FAILED. If the device is broken, that is no sequence's fault: then this raises.
        """
        with self._using_scheduler():
            return self._step()

    def _step(self) -> StepDeltas:
        began = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        self.times.note_prefills(plan, planned)
        self._blocked = plan.input.empty
        try:
            output = StepOutput([]) if plan.input.empty else self._run(plan.input)
        except Exception as error:
            log.exception("step %d failed", plan.input.step_id)
            self.times.count_failure()
            self._runner.check_device()
            failure = RunnerFailed(f"the model failed in a step: {type(error).__name__}: {error}").failure()
            return self._scheduler.abort_step(plan, failure.to_json())
        ran = time.perf_counter()
        self.times.observe_costs(plan, output, ran - planned)
        result = self._scheduler.commit(plan, output)
        committed = time.perf_counter()
        self.times.count_step(planned - began, ran - planned, committed - ran, result.num_tokens, result.num_branches)
        return result

    def _run(self, step: StepInput) -> StepOutput:
        if step.touches_other_blocks:
            return self._runner.run(step)
        with self._lending_scheduler():
            return self._runner.run(step)

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
        with self._using_scheduler():
            idle_s = self._turn()
            self.last_progress = time.monotonic()
            self._on_progress()
        if idle_s:
            self._wake.wait(idle_s)  # until time has passed or a command comes

    def _turn(self) -> float:
        """Runs the commands that are there, and a step if it may. Returns how long to wait before the next turn."""
        while self._commands:
            run_command(*self._commands.popleft(), self._scheduler)
        grant = self._next_grant()
        if grant is None:
            self._check_idle()
            return self._idle_round_s
        result = self._step()
        result.granted_by = grant.subscription_id
        if (
            result.deltas or result.progress or grant is not UNLIMITED
        ):  # a finite grant's steps are reported even if they are empty
            self._on_deltas(result)
        return BLOCKED_ROUND_S if self._blocked and not result.deltas else 0.0

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

    def _check_idle(self) -> None:
        now = time.monotonic()
        if not self._scheduler.has_work and now - self._checked > CHECK_EVERY_S:
            self._checked = now
            self._scheduler.check_state()

    def _refuse_commands(self) -> None:
        """Answers every command that is still there with Draining, so that no caller waits for ever."""
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
    except Exception as error:  # the caller of `post_command` gets it, whatever it is
        future.set_exception(error)
