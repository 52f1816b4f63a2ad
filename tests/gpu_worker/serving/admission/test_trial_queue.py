"""A suspect runs when the store knows of it and nothing else runs, and nothing else runs until the store lets it go."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from scheduler_parts import SchedulerParts
from served_worker import admissions_of

from gpu_worker.journal.journal_writer import JournalWriter
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.serving.admission import trial_queue
from gpu_worker.serving.admission.trial_queue import OwnershipAnnouncer
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Admission, AdmissionOutcome
from octavo.request.sampling import SamplingParams
from octavo.store.calls import PROOF_TOKENS, AppendItem, AppendReply, AppendStatus

OWNER = Incarnation("w")
WINDOW_STEPS = 100_000  # no step waits for a store that has not been told to journal: trials alone hold steps here


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
        self.answers: list[bool | Exception] = []  # to the next announcements; after these: yes
        self.may_announce = asyncio.Event()
        self.may_append = asyncio.Event()
        for event in (self.may_announce, self.may_append):
            event.set()

    async def announce(self, seq_id: SequenceId, epoch: int, owner: Incarnation) -> bool:
        self.announced.append(name_of(seq_id))
        await self.may_announce.wait()
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def append_batch(self, owner: Incarnation, items: list[AppendItem]) -> list[AppendReply]:
        await self.may_append.wait()
        return [AppendReply(AppendStatus.OK, item.first_index + len(item.token_ids)) for item in items]


class Bench:
    """The parts of a worker that a suspect comes by."""

    def __init__(self) -> None:
        self.runner, self.store = NotingRunner(), SlowStore()
        self.parts = SchedulerParts(SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8), self.runner.info)
        self.publisher, self.port = StepPublisher(), self.parts.port
        self.journal_writer = JournalWriter(
            self.store, OWNER, self.publisher, self.port, self.parts.control, window_steps=WINDOW_STEPS
        )
        self.engine = self.parts.engine(self.runner, self.journal_writer.submit_soon, idle_round_s=0.01)
        self.admissions = admissions_of(self.parts, self.publisher, OwnershipAnnouncer(self.store, OWNER))
        self.trials = self.admissions._trials
        self.task = asyncio.create_task(self.journal_writer.run())
        self.engine.start()
        self.engine.control.grant_steps(0)

    @property
    def steps(self) -> list[set[str]]:
        return self.runner.steps

    async def admit(self, name: str, max_tokens: int = 15_000, **more) -> AdmissionOutcome:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, best_of=1, ignore_eos=True)
        fields = {"seq_id": id_of(name), "epoch": 1, "prompt": list(name.encode()), "sampling": params, **more}
        return (await self.admissions.admit(Admission(**fields), "")).outcome

    async def suspect(self, name: str, **more) -> AdmissionOutcome:
        return await self.admit(name, suspect=True, epoch=4, **more)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.001)

    async def until_announced(self, *names: str) -> None:
        await self.until(lambda: self.store.announced == list(names))

    async def until_in_step(self, *names: str) -> None:
        """Returns when a step from now on has exactly these."""
        num_steps = len(self.steps)
        await self.until(lambda: set(names) in self.steps[num_steps:])

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.stop)
        self.trials.stop()
        self.task.cancel()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.admit("other")
    await made.until_in_step("other")
    yield made
    await made.close()


async def test_nothing_runs_from_before_a_suspect_is_announced_until_it_has_proved_itself(bench: Bench) -> None:
    bench.store.may_announce.clear()
    assert await bench.suspect("suspect") is AdmissionOutcome.ADMITTED
    await bench.until_announced("suspect")
    num_steps = len(bench.steps)
    await bench.admit("late")
    await asyncio.sleep(0.05)
    assert len(bench.steps) == num_steps, "a step began after the suspect was announced, and before the store answered"
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
    await bench.until(lambda: id_of("suspect") not in bench.parts.workload.sequences)
    num_steps = len(bench.steps)
    await asyncio.sleep(0.05)
    assert len(bench.steps) == num_steps
    bench.store.may_append.set()
    await bench.until_in_step("other")


@pytest.mark.parametrize("answer", [False, ValueError("the store says something nobody understands")])
async def test_a_suspect_that_the_store_refuses_does_not_run(bench: Bench, answer: bool | Exception) -> None:
    """Others go on."""
    bench.store.answers = [answer]
    await bench.suspect("suspect")
    await bench.until_announced("suspect")
    await bench.until_in_step("other")
    await bench.until(lambda: id_of("suspect") not in bench.publisher.logs)
    assert not any("suspect" in step for step in bench.steps)
    assert id_of("suspect") not in bench.parts.workload.sequences


async def test_suspects_have_the_engine_one_after_the_other(bench: Bench) -> None:
    bench.store.may_append.clear()  # before it has run: a store that hears of its tokens ends its trial at once
    await bench.suspect("first")
    await bench.until_in_step("first")
    await bench.suspect("second")
    await asyncio.sleep(0.05)
    assert bench.store.announced == ["first"]
    bench.store.may_append.set()
    await bench.until_announced("first", "second")
    await bench.until_in_step("first", "second", "other")
    on_trial = [step for step in bench.steps if step & {"first", "second"} and len(step) == 1]
    assert on_trial == sorted(on_trial, key=lambda step: step == {"second"})
    assert on_trial.count({"second"}) >= PROOF_TOKENS


@pytest.mark.parametrize("how", ["released", "moved on"])
async def test_others_go_on_after_a_suspect_that_has_another_owner(bench: Bench, how: str) -> None:
    bench.store.may_append.clear()
    await bench.suspect("suspect")
    await bench.until_in_step("suspect")
    if how == "released":
        sequence_log = bench.publisher.logs[id_of("suspect")]
        bench.port.tell(lambda scheduler: scheduler.drop(sequence_log.sequence))
        bench.publisher.release_log(sequence_log)
    else:
        await bench.admit("suspect", epoch=6)
    bench.store.may_append.set()
    await bench.until_in_step("other", *(["suspect"] if how == "moved on" else []))


async def test_a_suspect_that_was_lost_without_a_word_stops_nobody_for_ever(bench, monkeypatch):
    monkeypatch.setattr(trial_queue, "ABSENT_ROUND_S", 0.05)
    bench.store.may_append.clear()
    await bench.suspect("suspect")
    await bench.until_in_step("suspect")
    suspect = bench.publisher.logs[id_of("suspect")].sequence
    bench.port.tell(lambda scheduler: scheduler.drop(suspect))
    await bench.until_in_step("other")
