"""A suspect runs when the store knows of it and nothing else runs, and nothing else runs until the store lets it go."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from served_worker import ServedParts
from waiting import until

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.serving.admission import trial_queue
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionOutcome
from octavo.request.sampling import SamplingParams
from octavo.store.calls import PROOF_TOKENS, AppendItem, AppendReply, AppendStatus


def id_of(name: str) -> SequenceId:
    return SequenceId(name.encode().hex().zfill(32))


def name_of(seq_id: SequenceId) -> str:
    return bytes.fromhex(seq_id).decode().strip("\0")


class NotingRunner(FakeRunner):
    """Notes who was in each step."""

    def __init__(self) -> None:
        super().__init__(block_size=4, num_blocks=3000, num_host_blocks=4, context_tokens=16000, step_s=0.001)
        self.steps: list[set[str]] = []

    def run(self, step: StepInput, *further) -> StepOutput:
        output = super().run(step, *further)
        self.steps.append({bytes(seat.tokens[: seat.num_prompt]).decode() for seat in self.seats.of_chunks(step)})
        return output


class SlowStore:
    """A store that announces and journals when it is told to."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.answer: bool | Exception = True  # to announcements
        self.may_announce, self.may_append = asyncio.Event(), asyncio.Event()
        self.may_announce.set()
        self.may_append.set()

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        self.announced.append(name_of(seq_id))
        await self.may_announce.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def append_batch(self, owner: Incarnation, items: list[AppendItem]) -> list[AppendReply]:
        await self.may_append.wait()
        return [AppendReply(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]


class Bench(ServedParts):
    """The parts of a worker that a suspect comes by. No step waits for the journal: trials alone hold steps here."""

    def __init__(self) -> None:
        config = SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8)
        super().__init__(NotingRunner(), config, SlowStore(), window_steps=100_000, idle_round_s=0.01)
        self.steps: list[set[str]] = self.runner.steps

    async def admit(self, name: str, max_tokens: int = 15_000, **more) -> AdmissionOutcome:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, best_of=1, ignore_eos=True)
        fields = {"seq_id": id_of(name), "epoch": 1, "prompt": list(name.encode()), "sampling": params, **more}
        return (await self.admissions.admit(Admission(**fields), "")).outcome

    async def suspect(self, name: str, **more) -> AdmissionOutcome:
        return await self.admit(name, suspect=True, epoch=4, **more)

    async def until_announced(self, *names: str) -> None:
        await until(lambda: self.store.announced == list(names))

    async def until_in_step(self, *names: str) -> None:
        """Returns when a step from now on has exactly these."""
        num_steps = len(self.steps)
        await until(lambda: set(names) in self.steps[num_steps:])

    async def stands_still(self) -> None:
        num_steps = len(self.steps)
        await asyncio.sleep(0.05)
        assert len(self.steps) == num_steps


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.start()
    made.engine.control.grant_steps(0)
    await made.admit("other")
    await made.until_in_step("other")
    yield made
    await made.stop()


async def test_nothing_runs_from_before_a_suspect_is_announced_until_it_has_proved_itself(bench: Bench) -> None:
    bench.store.may_announce.clear()
    assert await bench.suspect("suspect") is AdmissionOutcome.ADMITTED
    await bench.until_announced("suspect")
    num_steps = len(bench.steps)
    await bench.admit("late")
    await bench.stands_still()  # until the store has answered
    bench.store.may_announce.set()
    await bench.until_in_step("suspect", "other", "late")
    first = next(number for number in range(num_steps, len(bench.steps)) if len(bench.steps[number]) > 1)
    assert bench.steps[num_steps:first] == [{"suspect"}] * (first - num_steps)
    assert first - num_steps >= PROOF_TOKENS


async def test_others_pause_until_the_store_has_heard_of_the_end(bench: Bench) -> None:
    """If one of them killed the worker before, the store would take the suspect for what ran."""
    await bench.until_in_step("other")
    bench.store.may_announce.clear()
    await bench.suspect("suspect", max_tokens=2)
    await bench.until_announced("suspect")
    bench.store.may_append.clear()
    bench.store.may_announce.set()
    await until(lambda: id_of("suspect") not in bench.parts.workload.sequences)
    await bench.stands_still()
    bench.store.may_append.set()
    await bench.until_in_step("other")


@pytest.mark.parametrize("answer", [False, ValueError("the store says something nobody understands")])
async def test_a_suspect_that_the_store_refuses_does_not_run(bench: Bench, answer: bool | Exception) -> None:
    """Others go on."""
    bench.store.answer = answer
    await bench.suspect("suspect")
    await bench.until_announced("suspect")
    await bench.until_in_step("other")
    await until(lambda: id_of("suspect") not in bench.publisher.logs)
    assert not any("suspect" in step for step in bench.steps)
    assert id_of("suspect") not in bench.parts.workload.sequences


@pytest.mark.parametrize("how", ["released", "moved on", "lost"])
async def test_others_go_on_after_a_suspect_that_has_another_owner(bench: Bench, how: str, monkeypatch) -> None:
    """Or that was lost without a word."""
    monkeypatch.setattr(trial_queue, "ABSENT_ROUND_S", 0.05 if how == "lost" else 60)
    bench.store.may_append.clear()
    await bench.suspect("suspect")
    await bench.until_in_step("suspect")
    sequence_log = bench.publisher.logs[id_of("suspect")]
    if how == "moved on":
        await bench.admit("suspect", epoch=6)
    else:
        bench.port.tell(lambda scheduler: scheduler.drop(sequence_log.sequence))
    if how == "released":
        bench.publisher.release_log(sequence_log)
    if how != "lost":
        bench.store.may_append.set()
    await bench.until_in_step("other", *(["suspect"] if how == "moved on" else []))
