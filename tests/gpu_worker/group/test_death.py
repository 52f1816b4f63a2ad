"""A rank that dies or hangs ends its group soon, and one that cannot start says why. Nothing is left behind."""

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from effort import diagonal, some
from guard.processes import ranks_of
from live.nursery import NurseryRank
from live.process import wait_until

from gpu_worker import LLM, SamplingParams
from gpu_worker.group import rank_watch
from gpu_worker.group.group_runner import GroupRunner
from gpu_worker.group.loading import load_group
from gpu_worker.group.rank_process import RankProcess
from gpu_worker.group.rank_task import RankTask
from gpu_worker.group.rank_watch import RankFailed, RankWatch
from gpu_worker.group.shared_memory import SharedMemory
from gpu_worker.steps.runner import StepOutput

from .conftest import SIZES

LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


def seconds_until(fails: Callable[[], None], most_s: float = 20.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < most_s:
        try:
            fails()
        except RankFailed:
            break
        time.sleep(0.01)
    return time.monotonic() - began


def lose_in_a_step(monkeypatch: pytest.MonkeyPatch, runner: GroupRunner, pid: int, signal_: signal.Signals) -> None:
    """Sends a rank a signal while the tenth step from now on runs, or the one after it: an output may soon be there."""
    run, num_left = runner.run, iter(range(9, -1, -1))

    def counted(*arguments: Any) -> StepOutput:
        if next(num_left, None) == 0:
            threading.Timer(0.0005, os.kill, (pid, signal_)).start()
        return run(*arguments)

    monkeypatch.setattr(runner, "run", counted)


def expect_the_end(llm: LLM, runner: GroupRunner, says: str) -> None:
    """A long step ends with the reason, in time, and the group stays ended."""
    began = time.monotonic()
    with pytest.raises(RankFailed, match=says):
        llm.generate("a", LONG, use_tqdm=False)
    assert time.monotonic() - began < 10
    with pytest.raises(RankFailed, match=says):
        runner.check_device()


@pytest.mark.parametrize("kind", some(["Mixtral", "GPT2"], ["Mixtral"]))
def test_a_rank_that_is_killed_in_a_step_of_experts_or_of_gpt_ends_the_group(group, folders, kind, monkeypatch):
    """A rank that hangs there is waited for as long as in any step."""
    for signal_, says in ((signal.SIGKILL, "killed by signal 9"), (signal.SIGSTOP, r"rank 1 (\(pid \d+\) )?has")):
        runner = group(2, patience_s=0.5, model=folders(kind))
        llm = LLM(str(folders(kind)), runner=runner)
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
        lose_in_a_step(monkeypatch, runner, runner.rank_pids[0], signal_)
        expect_the_end(llm, runner, says)


@pytest.mark.parametrize(("signal_", "idle"), diagonal([signal.SIGKILL, signal.SIGSTOP], [True, False]))
def test_a_rank_that_is_lost_ends_the_group(group, folder, signal_, idle, monkeypatch):
    says = "killed by signal 9" if signal_ == signal.SIGKILL else r"rank 2 (\(pid \d+\) )?has"
    runner = group(3, patience_s=0.5)
    llm = LLM(str(folder), runner=runner)
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    lost = runner.rank_pids[1]
    if idle:
        os.kill(lost, signal_)
        if signal_ == signal.SIGKILL:  # one that hangs is seen by the next step alone
            assert seconds_until(runner.check_device) < 5
    else:
        lose_in_a_step(monkeypatch, runner, lost, signal_)
    expect_the_end(llm, runner, says)


def test_a_step_of_which_no_row_is_wanted_waits_for_the_last_stage(group, folder, monkeypatch):
    """A piece in the middle of a prompt: a stage still reads the step, and writes its keys and values."""
    runner = group(1, stages=2)
    llm = LLM(str(folder), runner=runner, max_batch_tokens=SIZES["max_batch_tokens"])
    llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    returned, run = threading.Event(), runner.run

    def noted(*arguments: Any) -> StepOutput:
        output = run(*arguments)
        returned.set()
        return output

    monkeypatch.setattr(runner, "run", noted)
    os.kill(runner.rank_pids[0], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(llm.generate, "b" * 150, SamplingParams(max_tokens=1), use_tqdm=False)
        assert not returned.wait(0.5)
        os.kill(runner.rank_pids[0], signal.SIGCONT)
        assert len(answer.result()[0].outputs[0].token_ids) == 1


class PoorRank(RankProcess):
    """A rank that may have little memory."""

    def start(self) -> None:
        super().start()
        resource.prlimit(self.pid, resource.RLIMIT_AS, (400 << 20, 400 << 20))


@pytest.mark.parametrize(
    ("kind", "model", "says"),
    [
        (RankProcess, "nowhere", ".*nowhere"),
        (PoorRank, ".", "((ImportError|OSError|MemoryError): |killed by signal 6)"),
    ],
)
def test_a_rank_that_cannot_start_is_named_with_its_reason(folder, kind, model, says):
    with SharedMemory.create("team") as team, SharedMemory.create("arena") as arena:
        task = RankTask(
            rank=3,
            size=4,
            team=team.descriptor,
            arena=arena.descriptor,
            tokens=8,
            sequences=8,
            patience_s=1.0,
            options={"model": str(folder / model), "block_size": 16},
        )
        losses: list[int] = []
        watch = RankWatch([kind(task)], task.patience_s, lambda: losses.append(1))
        with pytest.raises(RankFailed, match=rf"^rank 3 \(pid \d+\): {says}"):
            watch.wait_until_ready()
        watch.close()
    assert losses == [1]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("device", [{}, {"rehearsal": "native"}])
def test_a_front_that_cannot_start_leaves_no_rank(folder: Path, device: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes: 1 do not hold a block"):
        load_group(str(folder), ranks=2, patience_s=1.0, **{**SIZES, **device, "kv_cache_bytes": 1})
    assert not ranks_of(os.getpid())


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("device", [{}, {"rehearsal": "native"}])
def test_a_rank_that_hangs_while_it_loads_is_named_and_ended(folder, device, monkeypatch):
    start = NurseryRank.start

    def start_stopped(process: NurseryRank) -> None:
        start(process)
        os.kill(process.pid, signal.SIGSTOP)

    monkeypatch.setattr(NurseryRank, "start", start_stopped)
    monkeypatch.setattr(rank_watch, "LOADING_S", 0.5)
    with pytest.raises(RankFailed, match=r"^rank 1 \(pid \d+\) is not ready 0.5 s after rank 0 has loaded its model: "):
        load_group(str(folder), ranks=2, patience_s=1.0, **{**SIZES, **device})
    assert not ranks_of(os.getpid())


def test_a_rank_says_that_it_lives_and_what_it_uses(group: Callable[..., GroupRunner], folder: Path) -> None:
    runner = group(2, patience_s=2.0)
    LLM(str(folder), runner=runner).generate("a", SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    wait_until(lambda: bool(runner.rank_states[1].memory_bytes), 10, "it says nothing")
    states = runner.rank_states
    assert [(state.rank, state.pid) for state in states] == [(0, os.getpid()), (1, runner.rank_pids[0])]
    assert all(state.host == socket.gethostname() for state in states)
    assert all(state.memory_bytes > 1 << 20 and state.cpu_s > 0 for state in states)
    assert max(state.waited_s for state in states) > 0


def test_a_rank_that_is_stopped_while_idle_ends_the_group(group: Callable[..., GroupRunner]) -> None:
    runner = group(2, patience_s=0.4)
    runner.check_device()
    os.kill(runner.rank_pids[0], signal.SIGSTOP)
    assert seconds_until(runner.check_device) < 10
    with pytest.raises(RankFailed, match=r"^rank 1 \(pid \d+\) has said nothing for 2 s$"):
        runner.check_device()
