"""The step loop: plan, run, commit, hand over. Its thread owns the runner; other threads post commands to its port.

The loop reports progress after each step and each idle round. Lease and health follow this progress, so an engine that
hangs loses both although its process lives.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack

from gpu_worker.engine.command_port import UNLIMITED, CommandPort, LoopControl
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.step import StepItems, StepPlan, SwapAnswer, SwapOperation
from gpu_worker.steps.runner import Runner, StepOutput
from octavo.request.errors import RunnerFailed
from octavo.request.ids import SequenceId

log = logging.getLogger(__name__)

IDLE_ROUND_S = 0.25  # how often an idle loop reports progress
BLOCKED_ROUND_S = 0.005  # how long it waits when every sequence can only wait
CHECK_EVERY_S = 10.0  # how often an idle loop recounts its blocks
STOP_TIMEOUT_S = 10.0  # how long `stop` waits for the step in flight


class Engine:
    """Runs the commands of its port, and as many steps as its control allows."""

    def __init__(
        self,
        port: CommandPort,
        control: LoopControl,
        scheduler: Scheduler,
        runner: Runner,
        times: StepTimes,
        on_items: Callable[[StepItems], None],
        on_progress: Iterable[Callable[[], None]] = (),
        idle_round_s: float = IDLE_ROUND_S,
    ) -> None:
        """On its thread `on_items` gets what a step has brought, and each `on_progress` is called after each round."""
        self.port = port
        self.control = control
        self.times = times
        self._scheduler = scheduler
        self._runner = runner
        self._on_items = on_items
        self._on_progress = tuple(on_progress)
        self._idle_round_s = idle_round_s
        self._stopping = False
        self._blocked = False  # the last step had nothing it could run
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._checked = time.monotonic()
        self.last_progress = time.monotonic()
        self.crash: Exception | None = None  # what ended the step loop

    def start(self) -> None:
        """Begins the loop in a thread of its own. May be called again."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ends the loop after the step in flight. False if that step still runs after `timeout_s`, on the runner."""
        self._stopping = True
        self.port.wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def swap(self, seq_id: SequenceId, epoch: int, operation: SwapOperation) -> "Future[SwapAnswer]":
        """Moves a sequence's blocks on request, between two steps: the copies are done when the future has its answer.

        No grant is used up. The error is what `Scheduler.swap` raises, or RunnerFailed if the copies failed: then the
        blocks are lost, and the sequence is computed again.
        """

        def command(scheduler: Scheduler) -> SwapAnswer:
            return self._copy_blocks(scheduler.swap(seq_id, epoch, operation))

        return self.port.post(command)

    # The loop

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

    def step(self) -> StepItems:
        """Runs one step. The caller must be the only thread that runs steps.

        If the runner raises, the step is aborted: its sequences are computed again, each by itself, and one that fails
        alone ends with RUNNER_FAILED. If the device is broken, that is no sequence's fault: then this raises.
        """
        with self.port.using_scheduler():
            return self._step()

    def _step(self) -> StepItems:
        began = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        self.times.note_prefills(plan, planned)
        self._blocked = plan.input.empty
        try:
            output = StepOutput([]) if plan.input.empty else self._run(plan)
        except Exception as error:
            log.exception("step %d failed", plan.input.step_id)
            self.times.num_failed += 1
            self._runner.check_device()
            failure = RunnerFailed(f"the model failed in a step: {type(error).__name__}: {error}").failure()
            return self._scheduler.abort_step(plan, failure)
        ran = time.perf_counter()
        self.times.observe_costs(plan, output, ran - planned)
        result = self._scheduler.commit(plan, output)
        committed = time.perf_counter()
        self.times.count_step(planned - began, ran - planned, committed - ran, result.num_tokens, result.num_branches)
        return result

    def _run(self, plan: StepPlan) -> StepOutput:
        """Runs the step. The scheduler is lent out as soon as its copies are made, if it has any."""
        with ExitStack() as lent:
            if not plan.input.touches_other_blocks:
                lent.enter_context(self.port.lending_scheduler())
                return self._runner.run(plan.input)

            def lend() -> None:
                self._scheduler.end_copies(plan)
                lent.enter_context(self.port.lending_scheduler())

            return self._runner.run(plan.input, lend)

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as error:
            log.exception("the step loop has ended; nothing runs here any more")
            self.crash = error
        finally:
            self.port.close()

    def _round(self) -> None:
        self.port.wake.clear()  # a command posted from here on is seen below, or ends the wait
        with self.port.using_scheduler():
            idle_s = self._turn()
            self.last_progress = time.monotonic()
            for report in self._on_progress:
                report()
        if idle_s:
            self.port.wake.wait(idle_s)  # until time has passed or a command comes

    def _turn(self) -> float:
        """Runs the commands that are there, and a step if it may. Returns how long to wait before the next turn."""
        self.port.run_commands()
        grant = self.control.next_grant(has_work=self._scheduler.has_work)
        if grant is None:
            self._check_idle()
            return self._idle_round_s
        result = self._step()
        result.granted_by = grant.subscription_id
        if (
            result.items or result.progress or grant is not UNLIMITED
        ):  # a finite grant's steps are reported even if they are empty
            self._on_items(result)
        return BLOCKED_ROUND_S if self._blocked and not result.items else 0.0

    def _check_idle(self) -> None:
        """Raises if the device, or a rank of a group, is lost: nobody would see it before the next step."""
        self._runner.check_device()
        now = time.monotonic()
        if not self._scheduler.has_work and now - self._checked > CHECK_EVERY_S:
            self._checked = now
            self._scheduler.check_state()
