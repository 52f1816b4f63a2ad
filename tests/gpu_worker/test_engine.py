"""The loop: grants, commands between steps, failures that stay with whom they concern."""

import threading
import time

import pytest

from gpu_worker.engine import Engine
from gpu_worker.fake_runner import FakeRunner, fake_oracle
from gpu_worker.plan import StepOutput, StepPlan
from gpu_worker.results import StepResult
from gpu_worker.scheduler import Scheduler, SchedulerConfig
from gpu_worker.sequence import Sequence
from octavo.ids import SequenceId
from octavo.sampling import FinishReason, SamplingParams


def until(condition, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.002)


class Failing(FakeRunner):
    """A model that cannot run one prompt."""

    def run(self, plan: StepPlan) -> StepOutput:
        if any(chunk.branch.tokens[0] == 13 for chunk in plan.chunks):
            raise RuntimeError("unlucky")
        return super().run(plan)


def sequence(name: str, prompt: list[int], max_tokens: int = 8) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)
    return Sequence.from_admission(
        seq_id=SequenceId(name), epoch=1, prompt=prompt, params=params, root=b"r" * 32, arrival=time.monotonic()
    )


@pytest.fixture
def make():
    engines = []

    def build(runner: FakeRunner | None = None) -> tuple[Engine, list[StepResult]]:
        results: list[StepResult] = []
        runner = runner or FakeRunner()
        engine = Engine(Scheduler(SchedulerConfig(max_batch_tokens=64, max_batch_sequences=16), runner.info), runner,
                        results.append)
        engines.append(engine)
        engine.start()
        return engine, results

    yield build
    for engine in engines:
        engine.stop()


def outputs(results: list[StepResult]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for result in list(results):
        for delta in result.deltas:
            tokens = found.setdefault(delta.sequence.seq_id, [])
            assert delta.first_index == len(tokens)
            tokens.extend(delta.token_ids)
    return found


def finishes(results: list[StepResult]) -> dict[str, FinishReason]:
    return {d.sequence.seq_id: d.finish for r in list(results) for d in r.deltas if d.finish}


def test_nothing_runs_without_a_grant_and_each_finite_grant_is_one_step(make):
    engine, results = make()
    engine.post(lambda s: s.admit(sequence("a", [1, 2, 3]))).result(5)
    time.sleep(0.05)
    assert results == []
    for count in (1, 2, 3):
        engine.grant(1)
        until(lambda wanted=count: len(results) == wanted)
    time.sleep(0.05)
    assert len(results) == 3
    assert outputs(results)["a"] == fake_oracle([1, 2, 3], 3, info=engine.runner.info)


def test_a_finite_grant_is_used_up_by_an_idle_step_too(make):
    engine, results = make()
    engine.grant(2)
    until(lambda: len(results) == 2)
    assert all(not result.deltas and not result.num_tokens for result in results)


def test_runs_until_paused_and_goes_on_when_granted_again(make):
    engine, results = make(FakeRunner(step_s=0.001))
    engine.grant(0)
    engine.post(lambda s: s.admit(sequence("a", [4], max_tokens=400))).result(5)
    until(lambda: len(results) > 5)
    engine.pause()
    engine.post(lambda s: None).result(5)  # the step in flight has ended
    count = len(results)
    time.sleep(0.05)
    assert len(results) == count
    engine.grant(0)
    until(lambda: "a" in finishes(results))
    assert outputs(results)["a"] == fake_oracle([4], 400, info=engine.runner.info)


def test_commands_never_run_during_a_step(make):
    engine, results = make(FakeRunner(step_s=0.005))
    engine.grant(0)
    engine.post(lambda s: s.admit(sequence("a", [4], max_tokens=50))).result(5)
    threads = {engine.post(lambda s: threading.current_thread().name).result(5) for _ in range(20)}
    assert threads == {"engine"}
    engine.post(lambda s: s.check()).result(5)


def test_a_command_that_raises_gives_its_error_to_the_caller_alone(make):
    engine, results = make()
    with pytest.raises(ZeroDivisionError):
        engine.post(lambda s: 1 // 0).result(5)
    assert engine.post(lambda s: 7).result(5) == 7


def test_a_prompt_the_model_cannot_run_fails_alone(make):
    engine, results = make(Failing())
    good = {f"g{i}": [20 + i, 2, 3] for i in range(5)}
    for name, prompt in [*good.items(), ("bad", [13, 1])]:
        engine.post(lambda s, n=name, p=prompt: s.admit(sequence(n, p))).result(5)
    engine.grant(0)
    until(lambda: len(finishes(results)) == 6)
    assert finishes(results)["bad"] is FinishReason.ERROR
    failure = next(d.failure for r in results for d in r.deltas if d.finish is FinishReason.ERROR)
    assert "unlucky" not in failure or "RuntimeError" in failure
    for name, prompt in good.items():
        assert outputs(results)[name] == fake_oracle(prompt, 8, info=engine.runner.info)
    engine.post(lambda s: s.check()).result(5)


def test_holding_back_stops_steps_and_progress_goes_on(make):
    engine, results = make(FakeRunner(step_s=0.001))
    engine.grant(0)
    engine.post(lambda s: s.admit(sequence("a", [4], max_tokens=3000))).result(5)
    until(lambda: len(results) > 3)
    engine.hold(True)
    engine.post(lambda s: None).result(5)
    count, progress = len(results), engine.last_progress
    until(lambda: engine.last_progress > progress + 0.3)
    assert len(results) <= count + 1
    engine.hold(False)
    until(lambda: len(results) > count + 5)
