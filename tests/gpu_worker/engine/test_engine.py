"""The loop: grants, commands between steps, failures that stay with whom they concern."""

import threading
import time

import pytest
from effort import patience
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.engine.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.step import StepItems, SubscriptionId, SwapAnswer
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.request.errors import Draining, OutOfBlocks, RunnerFailed
from octavo.request.sampling import FinishReason, SamplingParams

ONE, OTHER = SubscriptionId(1), SubscriptionId(2)

INFO = FakeRunner().info


def until(condition, seconds: float = 10.0) -> None:
    limit = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.002)


class Failing(FakeRunner):
    """A model that cannot run one prompt."""

    def run(self, step: StepInput, *further) -> StepOutput:
        output = super().run(step, *further)
        if any(seat.tokens[0] == 13 for seat in self.seats.of_chunks(step)):
            raise RuntimeError("unlucky")
        return output


def sequence(name: str, prompt: list[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)
    return new_sequence(name, prompt, params)


def new_parts(runner: FakeRunner) -> SchedulerParts:
    return SchedulerParts(SchedulerConfig(max_batch_tokens=64, max_batch_sequences=16), runner.info)


@pytest.fixture
def make():
    engines = []

    def build(runner: FakeRunner | None = None, parts: SchedulerParts | None = None) -> tuple[Engine, list[StepItems]]:
        results: list[StepItems] = []
        runner = runner or FakeRunner()
        engine = (parts or new_parts(runner)).engine(runner, results.append)
        engines.append(engine)
        engine.start()
        return engine, results

    yield build
    for engine in engines:
        engine.stop()


def outputs(results: list[StepItems]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for result in list(results):
        for item in result.items:
            tokens = found.setdefault(item.seq_id, [])
            assert item.first_index == len(tokens)
            tokens.extend(item.token_ids)
    return found


def finishes(results: list[StepItems]) -> dict[str, FinishReason]:
    return {d.seq_id: d.finish for r in list(results) for d in r.items if d.finish}


def test_nothing_runs_without_a_grant_and_each_finite_grant_is_one_step(make):
    engine, results = make()
    engine.port.post(lambda s: s.admit(sequence("a", [1, 2, 3]))).result(5)
    time.sleep(0.05)
    assert results == []
    for count in (1, 2, 3):
        engine.control.grant_steps(1)
        until(lambda wanted=count: len(results) == wanted)
    time.sleep(0.05)
    assert len(results) == 3
    assert outputs(results)["a"] == fake_oracle([1, 2, 3], 3, info=INFO)


class Gated(FakeRunner):
    """Each step that runs something waits for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.running = threading.Event()

    def run(self, step: StepInput, *further) -> StepOutput:
        self.running.set()
        assert self.turns.acquire(timeout=20)
        self.running.clear()
        return super().run(step, *further)


def test_a_block_command_runs_while_the_runner_is_busy_and_no_other_command_does(make):
    runner = Gated()
    engine, results = make(runner)
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=2))).result(5)
    engine.control.grant_steps(0)
    assert runner.running.wait(20)
    waits = engine.port.post(lambda s: len(results))
    done = engine.port.post_block(lambda s: threading.current_thread().name)
    assert done.done()
    assert done.result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        engine.port.post_block(lambda s: 1 // 0).result(0)
    assert not waits.done()
    runner.turns.release(2)
    assert waits.result(20) == 1
    until(lambda: "a" in finishes(results))


class CopyingFirst(FakeRunner):
    """Each step makes copies, says so, and then runs, as long as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_copy, self.may_run = threading.Semaphore(0), threading.Semaphore(0)
        self.copying, self.running = threading.Event(), threading.Event()
        self.fails = False

    def run(self, step: StepInput, on_copied=lambda: None) -> StepOutput:
        self.copying.set()
        assert self.may_copy.acquire(timeout=20)
        on_copied()
        self.running.set()
        assert self.may_run.acquire(timeout=20)
        if self.fails:
            self.fails = False
            raise RuntimeError("after its copies")
        return super().run(step)


@pytest.mark.parametrize("fails", [False, True])
def test_block_commands_run_as_soon_as_a_step_has_made_its_copies(make, monkeypatch, fails):
    monkeypatch.setattr(StepInput, "touches_other_blocks", True)
    runner = CopyingFirst()
    engine, results = make(runner)
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=2))).result(5)
    engine.control.grant_steps(0)
    assert runner.copying.wait(20)
    early = engine.port.post_block(lambda s: threading.current_thread().name)
    assert not early.done()
    runner.fails = fails
    runner.may_copy.release()
    assert runner.running.wait(20)
    assert early.result(20) == "engine"
    late = engine.port.post_block(lambda s: threading.current_thread().name)
    assert late.done() and late.result() == threading.current_thread().name
    other = engine.port.post(lambda s: None)
    assert not other.done()
    for gate in (runner.may_copy, runner.may_run):
        gate.release(5)
    other.result(20)
    until(lambda: "a" in finishes(results))
    assert outputs(results)["a"] == fake_oracle([4], 2, info=INFO)
    engine.port.post(lambda s: s.check_state()).result(5)


def test_one_thread_at_a_time_uses_the_scheduler(make, monkeypatch):
    inside, seen = [0], []
    parts = new_parts(FakeRunner())

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
        monkeypatch.setattr(parts.scheduler, name, alone(getattr(parts.scheduler, name)))
    engine, results = make(FakeRunner(step_s=0.001), parts)
    futures = []

    def post() -> None:
        while "a" not in finishes(results):
            futures.append(engine.port.post_block(lambda s: s.check_state()))
            futures[-1].result(20)
            time.sleep(0.001)

    threads = [threading.Thread(target=post) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(futures) > 10)  # all that post are there before the first step
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=60)))
    engine.control.grant_steps(0)
    for thread in threads:
        thread.join(30)
    assert max(seen) == 1
    assert len(futures) > 10 + len(threads)


def test_block_commands_without_end_do_not_keep_the_loop_from_its_steps(make):
    engine, results = make(FakeRunner(step_s=0.001))

    def post_another(_) -> None:
        if "a" not in finishes(results):
            engine.port.post_block(post_another)

    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=60)))
    for _ in range(4):
        engine.port.post_block(post_another)
    engine.control.grant_steps(0)
    until(lambda: "a" in finishes(results))


def test_a_command_that_raises_gives_its_error_to_the_caller_alone(make):
    engine, _ = make()
    with pytest.raises(ZeroDivisionError):
        engine.port.post(lambda s: 1 // 0).result(5)
    assert engine.port.post(lambda s: 7).result(5) == 7


def test_a_prompt_the_model_cannot_run_fails_alone(make):
    engine, results = make(Failing())
    good = {f"g{i}": [20 + i, 2, 3] for i in range(5)}
    for name, prompt in [*good.items(), ("bad", [13, 1])]:
        engine.port.post(lambda s, n=name, p=prompt: s.admit(sequence(n, p))).result(5)
    engine.control.grant_steps(0)
    until(lambda: len(finishes(results)) == 6)
    assert finishes(results)["bad"] is FinishReason.ERROR
    failure = next(d.failure for r in results for d in r.items if d.finish is FinishReason.ERROR)
    assert "RuntimeError: unlucky" in failure.message
    for name, prompt in good.items():
        assert outputs(results)[name] == fake_oracle(prompt, 8, info=INFO)
    engine.port.post(lambda s: s.check_state()).result(5)


def test_a_broken_device_ends_the_loop_and_no_sequence(make):
    class Dead(FakeRunner):
        dead = False

        def run(self, step: StepInput, *further) -> StepOutput:
            self.dead = True
            raise RuntimeError("an illegal memory access was encountered")

        def check_device(self) -> None:
            if self.dead:
                raise RuntimeError("an illegal memory access was encountered")

    engine, results = make(Dead())
    engine.port.post(lambda s: s.admit(sequence("a", [1, 2, 3]))).result(5)
    engine.control.grant_steps(0)
    until(lambda: engine.crash)
    assert not results


def test_holding_back_stops_steps_and_progress_goes_on(make):
    engine, results = make(FakeRunner(step_s=0.001))
    engine.control.grant_steps(0)
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=3000))).result(5)
    until(lambda: len(results) > 3)
    engine.control.hold_steps(True)
    engine.port.post(lambda s: None).result(5)
    count, progress = len(results), engine.last_progress
    until(lambda: engine.last_progress > progress + 0.3)
    assert len(results) <= count + 1
    engine.control.hold_steps(False)
    until(lambda: len(results) > count + 5)


def test_each_result_says_whose_finite_grant_it_used_up_though_idle(make):
    engine, results = make()
    engine.control.grant_steps(2, ONE)
    engine.control.grant_steps(1, OTHER)
    engine.control.grant_steps(1, ONE)
    until(lambda: len(results) == 4)
    assert [result.granted_by for result in results] == [ONE, ONE, OTHER, ONE]
    assert not any(result.items or result.num_tokens for result in results)


def test_a_finite_grant_is_exact_while_the_worker_runs_freely(make):
    engine, results = make(FakeRunner(step_s=0.001))
    engine.control.grant_steps(0)
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=2000))).result(5)
    until(lambda: len(results) > 3)
    engine.control.grant_steps(5, ONE)
    until(lambda: sum(result.granted_by == ONE for result in results) == 5)
    count = len(results)
    until(lambda: len(results) > count + 3)
    assert sum(result.granted_by == ONE for result in results) == 5


def test_pause_says_what_it_took_back(make):
    engine, results = make(FakeRunner(step_s=0.05))
    engine.port.post(lambda s: s.admit(sequence("a", [4], max_tokens=100))).result(5)
    engine.control.grant_steps(50, ONE)
    engine.control.grant_steps(7, OTHER)
    engine.control.grant_steps(0)  # last, or a step might begin by it before there are others
    until(lambda: len(results) >= 2)
    left = {grant.subscription_id: grant.steps for grant in engine.control.pause().result(5)}
    count = len(results)
    assert left == {ONE: 50 - count, OTHER: 7}
    time.sleep(0.1)
    assert len(results) == count


def test_work_that_can_only_wait_neither_spins_nor_reports(make):
    """A sequence that was moved out on request stays out; the loop must not burn a core over it."""
    engine, results = make()
    engine.port.post(lambda s: s.admit(sequence("a", [4] * 40, max_tokens=100))).result(5)
    engine.control.grant_steps(3)
    until(lambda: len(results) == 3)
    assert engine.port.post(lambda s: s.swap("a", 1, "out")).result(5) > 0
    engine.control.grant_steps(0)
    engine.port.post(lambda s: None).result(5)
    before, steps, began = len(results), engine.times.num_steps, time.monotonic()
    time.sleep(0.3)
    assert engine.times.num_steps - steps < 2 * (time.monotonic() - began) / BLOCKED_ROUND_S
    assert len(results) - before <= 2


def test_a_command_wakes_an_idle_loop_at_once(make):
    engine, _ = make()
    time.sleep(0.02)
    began = time.monotonic()
    for _ in range(20):  # each would wait a quarter of a second for the next round
        engine.port.post(lambda s: None).result(5)
    assert time.monotonic() - began < 4


def test_nobody_waits_for_a_loop_that_has_ended(make):
    engine, _ = make()
    engine.stop()
    for _ in range(3):
        with pytest.raises(Draining):
            engine.port.post(lambda s: None).result(1)
        with pytest.raises(Draining):
            engine.port.post_block(lambda s: None).result(1)


def test_a_loop_says_whether_it_ended_in_time(make):
    class Slow(FakeRunner):
        def run(self, step: StepInput, *further) -> StepOutput:
            running.set()
            gate.wait(10)
            return super().run(step, *further)

    running, gate = threading.Event(), threading.Event()
    engine, _ = make(Slow())
    engine.port.post(lambda s: s.admit(sequence("a", [1, 2, 3]))).result(5)
    engine.control.grant_steps(1)
    assert running.wait(5)
    assert not engine.stop(timeout_s=0.05)
    gate.set()
    assert engine.stop()


def test_a_swap_is_copied_and_measured_before_its_answer(make):
    class Measured(FakeRunner):
        def run(self, step: StepInput, *further) -> StepOutput:
            output = super().run(step, *further)
            if step.timed:
                moves.append(step)
                output.copy_s = 0.25
            return output

    moves: list[StepInput] = []
    engine, results = make(Measured(num_host_blocks=3))
    engine.port.post(lambda s: s.admit(sequence("a", [5] * 40))).result(5)
    engine.port.post(lambda s: s.admit(sequence("b", [6] * 40))).result(5)
    engine.control.grant_steps(1)
    until(lambda: "a" in outputs(results))
    assert engine.times.prefill_tokens_per_s, "a step with prompts is measured"
    assert engine.swap("a", 1, "out").result(5) == SwapAnswer(3, 3 * INFO.bytes_per_block, 0.25)
    assert [len(step.swap_out) for step in moves] == [3]
    assert engine.times.num_steps == 1, "a swap uses up no step and no grant"
    assert engine.swap("a", 1, "out").result(5) == SwapAnswer(0)
    with pytest.raises(OutOfBlocks):
        engine.swap("b", 1, "out").result(5)
    engine.control.grant_steps(0)
    until(lambda: "b" in finishes(results))
    assert "a" not in finishes(results)
    back = engine.swap("a", 1, "in").result(5)
    assert back.num_blocks == 3 and len(moves) == 2
    # The prefix cache still has the two full blocks, so the third alone was copied.
    assert [len(step.swap_in) for step in moves] == [0, 1] and back.num_bytes == INFO.bytes_per_block
    until(lambda: "a" in finishes(results))
    assert outputs(results)["a"] == fake_oracle([5] * 40, 8, info=INFO)


def test_a_swap_whose_copies_fail_loses_nothing(make):
    class Broken(FakeRunner):
        def run(self, step: StepInput, *further) -> StepOutput:
            if step.swap_out:
                raise RuntimeError("no such page")
            return super().run(step, *further)

    engine, results = make(Broken())
    engine.port.post(lambda s: s.admit(sequence("a", [5] * 40))).result(5)
    engine.control.grant_steps(2)
    until(lambda: "a" in outputs(results))
    with pytest.raises(RunnerFailed, match="no such page"):
        engine.swap("a", 1, "out").result(5)
    engine.control.grant_steps(0)
    until(lambda: finishes(results))
    assert outputs(results) == {"a": fake_oracle([5] * 40, 8, info=INFO)}
    engine.port.post(lambda s: s.check_state()).result(5)
