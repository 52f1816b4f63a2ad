"""The loop: grants, commands between steps, failures that stay with whom they concern."""

import threading
import time
from collections.abc import Callable

import pytest
from scheduler_parts import SchedulerParts
from sequences import new_sequence
from waiting import wait_until

from gpu_worker.engine.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.step import StepItems, SubscriptionId, SwapAnswer
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.request.errors import Draining, OutOfBlocks, RunnerFailed
from octavo.request.sampling import FinishReason, SamplingParams

ONE, OTHER = SubscriptionId(1), SubscriptionId(2)
INFO = FakeRunner().info


class Hooked(FakeRunner):
    """Calls `before` a step, with what is to be called when its copies are made, and `after` it, with its output."""

    def __init__(self, before=lambda *_: None, after=lambda *_: None, **sizes) -> None:
        super().__init__(**sizes)
        self.before, self.after = before, after

    def run(self, step: StepInput, on_copied=lambda: None) -> StepOutput:
        self.before(step, on_copied)
        output = super().run(step)
        self.after(step, output)
        return output


class Loop:
    """An engine, and what came of its steps."""

    def __init__(self, runner: FakeRunner) -> None:
        config = SchedulerConfig(max_batch_tokens=64, max_batch_sequences=16)
        self.parts, self.results = SchedulerParts(config, runner.info), list[StepItems]()
        self.engine: Engine = self.parts.engine(runner, self.results.append)
        self.control, port = self.engine.control, self.engine.port
        self.post, self.post_block = port.post, port.post_block

    def admit(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)
        self.post(lambda scheduler: scheduler.admit(new_sequence(name, prompt, params))).result(20)

    def outputs(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for item in (item for result in list(self.results) for item in result.items):
            tokens = found.setdefault(item.seq_id, [])
            assert item.first_index == len(tokens)
            tokens.extend(item.token_ids)
        return found

    def finishes(self) -> dict[str, FinishReason]:
        return {item.seq_id: item.finish for result in list(self.results) for item in result.items if item.finish}

    def until_results(self, count: int) -> None:
        wait_until(lambda: len(self.results) >= count)

    def until_ended(self, *names: str) -> None:
        wait_until(lambda: self.finishes().keys() >= set(names))


@pytest.fixture
def make():
    loops = []

    def build(runner: FakeRunner | None = None) -> Loop:
        loops.append(Loop(runner or FakeRunner()))
        loops[-1].engine.start()
        return loops[-1]

    yield build
    for loop in loops:
        loop.engine.stop()


# Grants


def test_nothing_runs_without_a_grant_and_each_finite_grant_is_one_step_also_of_nothing(make):
    loop = make()
    loop.control.grant_steps(2, ONE)
    loop.control.grant_steps(1, OTHER)
    loop.control.grant_steps(1, ONE)
    loop.until_results(4)
    assert [result.granted_by for result in loop.results] == [ONE, ONE, OTHER, ONE]
    assert not any(result.items or result.num_tokens for result in loop.results)
    loop.admit("a", [1, 2, 3])
    time.sleep(0.05)
    assert len(loop.results) == 4
    for count in (5, 6, 7):
        loop.control.grant_steps(1)
        loop.until_results(count)
    time.sleep(0.05)
    assert len(loop.results) == 7
    assert loop.outputs()["a"] == fake_oracle([1, 2, 3], 3, info=INFO)


def test_a_finite_grant_is_exact_while_the_worker_runs_freely_and_steps_are_held_back(make):
    loop = make(FakeRunner(step_s=0.001))
    loop.control.grant_steps(0)
    loop.admit("a", [4], max_tokens=5000)
    loop.until_results(4)
    loop.control.grant_steps(5, ONE)
    wait_until(lambda: sum(result.granted_by == ONE for result in loop.results) == 5)
    loop.until_results(len(loop.results) + 4)
    assert sum(result.granted_by == ONE for result in loop.results) == 5
    loop.control.hold_steps(True)
    loop.post(lambda _: None).result(20)
    count, progress = len(loop.results), loop.engine.last_progress
    wait_until(lambda: loop.engine.last_progress > progress + 0.3)
    assert len(loop.results) <= count + 1, "its loop goes round, and nothing runs"
    loop.control.hold_steps(False)
    loop.until_results(count + 6)


def test_pause_says_what_it_took_back(make):
    loop = make(FakeRunner(step_s=0.05))
    loop.admit("a", [4], max_tokens=100)
    loop.control.grant_steps(50, ONE)
    loop.control.grant_steps(7, OTHER)
    loop.control.grant_steps(0)  # last, or a step might begin by it before there are others
    loop.until_results(2)
    left = {grant.subscription_id: grant.steps for grant in loop.control.pause().result(20)}
    count = len(loop.results)
    assert left == {ONE: 50 - count, OTHER: 7}
    time.sleep(0.1)
    assert len(loop.results) == count


# Commands


@pytest.mark.parametrize(("copies", "fails"), [(False, False), (True, False), (True, True)])
def test_block_commands_run_beside_a_step_that_has_made_its_copies(make, monkeypatch, copies, fails):
    """At once, on the thread that posts them; earlier ones when the copies are made. No other command does."""
    may_copy, may_run, copying, running = (threading.Semaphore(0) for _ in range(4))
    fail = [fails]

    def before(step: StepInput, on_copied: Callable[[], None]) -> None:
        copying.release()
        assert may_copy.acquire(timeout=20)
        on_copied()
        running.release()
        assert may_run.acquire(timeout=20)
        if fail[0]:
            fail[0] = False
            raise RuntimeError("after its copies")

    def name_thread(_: object) -> str:
        return threading.current_thread().name

    monkeypatch.setattr(StepInput, "touches_other_blocks", copies)
    loop = make(Hooked(before))
    loop.admit("a", [4], max_tokens=2)
    loop.control.grant_steps(0)
    assert copying.acquire(timeout=20)
    early = loop.post_block(name_thread)
    assert early.done() != copies
    may_copy.release()
    assert running.acquire(timeout=20)
    assert early.result(20) == ("engine" if copies else threading.current_thread().name)
    late, other = loop.post_block(name_thread), loop.post(lambda _: len(loop.results))
    assert late.done() and late.result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        loop.post_block(lambda _: 1 // 0).result(0)
    assert not other.done()
    for gate in (may_copy, may_run):
        gate.release(5)
    assert other.result(20) == 1 or fails
    loop.until_ended("a")
    assert loop.outputs()["a"] == fake_oracle([4], 2, info=INFO)
    loop.post(lambda scheduler: scheduler.check_state()).result(20)


def test_one_thread_at_a_time_uses_the_scheduler(make, monkeypatch):
    inside, seen = [0], []
    loop = make(FakeRunner(step_s=0.001))

    def alone(call):
        def called(*args):
            inside[0] += 1
            seen.append(inside[0])
            time.sleep(0.0005)
            try:
                return call(*args)
            finally:
                inside[0] -= 1

        return called

    for name in ("plan", "commit", "check_state"):
        monkeypatch.setattr(loop.parts.scheduler, name, alone(getattr(loop.parts.scheduler, name)))
    futures = []

    def post() -> None:
        while not loop.finishes():
            futures.append(loop.post_block(lambda scheduler: scheduler.check_state()))
            futures[-1].result(20)
            time.sleep(0.001)

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(futures) > 10)  # all that post are there before the first step
    loop.admit("a", [4], max_tokens=30)
    loop.control.grant_steps(0)
    for thread in threads:
        thread.join(60)
    assert max(seen) == 1
    assert len(futures) > 10 + len(threads)


def test_block_commands_without_end_do_not_keep_the_loop_from_its_steps(make):
    loop = make(FakeRunner(step_s=0.001))

    def post_another(_) -> None:
        if not loop.finishes():
            loop.post_block(post_another)

    loop.admit("a", [4], max_tokens=30)
    for _ in range(4):
        loop.post_block(post_another)
    loop.control.grant_steps(0)
    loop.until_ended("a")


def test_a_command_wakes_an_idle_loop_at_once_and_its_error_is_its_callers_alone(make):
    loop = make()
    time.sleep(0.02)
    began = time.monotonic()
    for _ in range(20):  # each would wait a quarter of a second for the next round
        with pytest.raises(ZeroDivisionError):
            loop.post(lambda _: 1 // 0).result(20)
        assert loop.post(lambda _: 7).result(20) == 7
    assert time.monotonic() - began < 8


def test_work_that_can_only_wait_neither_spins_nor_reports(make):
    """A sequence that was moved out on request stays out; the loop must not burn a core over it."""
    loop = make()
    loop.admit("a", [4] * 40, max_tokens=100)
    loop.control.grant_steps(3)
    loop.until_results(3)
    assert loop.post(lambda scheduler: scheduler.swap("a", 1, "out")).result(20) > 0
    loop.control.grant_steps(0)
    loop.post(lambda _: None).result(20)
    before, steps, began = len(loop.results), loop.engine.times.num_steps, time.monotonic()
    time.sleep(0.3)
    assert loop.engine.times.num_steps - steps < 2 * (time.monotonic() - began) / BLOCKED_ROUND_S
    assert len(loop.results) - before <= 2


def test_a_loop_says_whether_it_ended_in_time_and_nobody_waits_for_one_that_has(make):
    running, gate = threading.Event(), threading.Event()
    loop = make(Hooked(lambda *_: (running.set(), gate.wait(20))))
    loop.admit("a", [1, 2, 3])
    loop.control.grant_steps(1)
    assert running.wait(20)
    assert not loop.engine.stop(timeout_s=0.05)
    gate.set()
    assert loop.engine.stop()
    for post in (loop.post, loop.post_block):
        with pytest.raises(Draining):
            post(lambda _: None).result(1)


# Failures


def test_a_prompt_the_model_cannot_run_fails_alone(make):
    def after(step: StepInput, _: StepOutput) -> None:
        if any(seat.tokens[0] == 13 for seat in runner.seats.of_chunks(step)):
            raise RuntimeError("unlucky")

    runner = Hooked(after=after)
    loop = make(runner)
    good = {f"g{i}": [20 + i, 2, 3] for i in range(5)}
    for name, prompt in [*good.items(), ("bad", [13, 1])]:
        loop.admit(name, prompt)
    loop.control.grant_steps(0)
    loop.until_ended("bad", *good)
    [failed] = [item for result in loop.results for item in result.items if item.finish is FinishReason.ERROR]
    assert failed.seq_id == "bad" and "RuntimeError: unlucky" in failed.failure.message
    for name, prompt in good.items():
        assert loop.outputs()[name] == fake_oracle(prompt, 8, info=INFO)
    loop.post(lambda scheduler: scheduler.check_state()).result(20)


def test_a_broken_device_ends_the_loop_and_no_sequence(make, monkeypatch):
    def fail(*_: object) -> None:
        monkeypatch.setattr(runner, "check_device", fail)
        raise RuntimeError("an illegal memory access was encountered")

    runner = Hooked(fail)
    loop = make(runner)
    loop.admit("a", [1, 2, 3])
    loop.control.grant_steps(0)
    wait_until(lambda: loop.engine.crash)
    assert not loop.results


# Swaps


def test_a_swap_is_copied_and_measured_before_its_answer(make):
    moves: list[StepInput] = []

    def after(step: StepInput, output: StepOutput) -> None:
        if step.timed:
            moves.append(step)
            output.copy_s = 0.25

    loop = make(Hooked(after=after, num_host_blocks=3))
    swap = loop.engine.swap
    loop.admit("a", [5] * 40)
    loop.admit("b", [6] * 40)
    loop.control.grant_steps(1)
    loop.until_results(1)
    assert loop.engine.times.prefill_tokens_per_s, "a step with prompts is measured"
    assert swap("a", 1, "out").result(20) == SwapAnswer(3, 3 * INFO.bytes_per_block, 0.25)
    assert [len(step.swap_out) for step in moves] == [3]
    assert loop.engine.times.num_steps == 1, "a swap uses up no step and no grant"
    assert swap("a", 1, "out").result(20) == SwapAnswer(0)
    with pytest.raises(OutOfBlocks):
        swap("b", 1, "out").result(20)
    loop.control.grant_steps(0)
    loop.until_ended("b")
    assert "a" not in loop.finishes()
    back = swap("a", 1, "in").result(20)
    assert back.num_blocks == 3 and len(moves) == 2
    # The prefix cache still has the two full blocks, so the third alone was copied.
    assert [len(step.swap_in) for step in moves] == [0, 1] and back.num_bytes == INFO.bytes_per_block
    loop.until_ended("a")
    assert loop.outputs()["a"] == fake_oracle([5] * 40, 8, info=INFO)


def test_a_swap_whose_copies_fail_loses_nothing(make):
    def before(step: StepInput, _: object) -> None:
        if step.swap_out:
            raise RuntimeError("no such page")

    loop = make(Hooked(before))
    loop.admit("a", [5] * 40)
    loop.control.grant_steps(2)
    loop.until_results(2)
    with pytest.raises(RunnerFailed, match="no such page"):
        loop.engine.swap("a", 1, "out").result(20)
    loop.control.grant_steps(0)
    loop.until_ended("a")
    assert loop.outputs() == {"a": fake_oracle([5] * 40, 8, info=INFO)}
    loop.post(lambda scheduler: scheduler.check_state()).result(20)
