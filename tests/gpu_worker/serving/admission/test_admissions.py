"""Admissions, cancels and ends in any order: the logs and the scheduler agree, and nobody waits for nothing."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from served_worker import ServedParts
from waiting import until

from gpu_worker.journal.step_subscription import StepSubscription
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.request.errors import Draining
from octavo.request.ids import SequenceId
from octavo.request.record import Admission, AdmissionOutcome
from octavo.request.sampling import SamplingParams


def request(
    number: int = 0, epoch: int = 1, max_tokens: int = 6, prompt_tokens: int = 5, n: int = 1, **more
) -> Admission:
    fields = {
        "seq_id": SequenceId(f"{number:032x}"),
        "epoch": epoch,
        "prompt": [number + 1] * prompt_tokens,
        "sampling": SamplingParams(temperature=n - 1, max_tokens=max_tokens, seed=1, n=n, best_of=n, ignore_eos=True),
    }
    return Admission(**{**fields, **more})


class World(ServedParts):
    """Admissions to an engine, and a stream that observes everything."""

    def __init__(self, max_waiting: int = 1000) -> None:
        runner = FakeRunner(block_size=4, num_blocks=16, num_host_blocks=4, context_tokens=128)
        sizes = {"max_batch_tokens": 32, "max_batch_sequences": 8, "watermark": 0.0}
        super().__init__(runner, SchedulerConfig(**sizes, max_waiting=max_waiting))
        self.observer = StepSubscription()
        self.publisher.add_subscription(self.observer)
        self.publisher.add_observer(self.observer)

    @property
    def sequences(self):
        return self.parts.workload.sequences

    async def settle(self) -> None:
        """Returns when everything posted has been done and its consequences are here."""
        for _ in range(3):
            await asyncio.wrap_future(self.engine.port.post(lambda scheduler: scheduler.check_state()))
            await asyncio.sleep(0)
            await self.journal_writer.wait_until_flushed()
            await asyncio.sleep(0)

    def told(self) -> dict[tuple[str, int, int], list[int]]:
        """The tokens of each branch at each epoch, as a reader has them who drops what it has already."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for item in (item for step in self.observer.ready for item in step.items):
            tokens = found.setdefault((item.seq_id, item.epoch, item.branch), [])
            assert item.first_index <= len(tokens)
            known = len(tokens) - item.first_index
            assert tokens[item.first_index :] == list(item.token_ids[:known])
            tokens += item.token_ids[known:]
        return found


@asynccontextmanager
async def running(max_waiting: int = 1000) -> AsyncIterator[World]:
    world = World(max_waiting)
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running() as made:
        yield made


async def test_a_repeated_admission_is_answered_alike_also_while_the_first_is_decided(world):
    router = StepSubscription()
    world.publisher.add_subscription(router)
    world.publisher.assign_router(router, "r2")
    answers = await asyncio.gather(*(world.admissions.admit(request(1), name) for name in ("r1", "r2", "r1")))
    assert all(answer.admitted for answer in answers)
    assert len(world.sequences) == len(world.publisher.logs) == 1
    assert router in world.publisher.logs[request(1).seq_id].followers
    assert not world.admissions._deciding


async def test_an_admission_that_fails_when_nobody_asks_any_more_is_no_error_of_the_loop(world):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    await asyncio.to_thread(world.engine.stop)
    asking = asyncio.create_task(world.admissions.admit(request(1), ""))
    await turns(1)
    [deciding] = world.admissions._deciding.values()
    asking.cancel()
    await asyncio.wait({deciding})
    with pytest.raises(asyncio.CancelledError):
        await asking
    del deciding, asking
    gc.collect()
    assert not told
    with pytest.raises(Draining):
        await world.admissions.admit(request(1), "")


async def test_a_refusal_is_told_to_everybody_who_asked_and_leaves_nothing(monkeypatch):
    """Also of a defect: an error of gRPC instead of an answer would have routers ask again, many times a second."""

    async def broken(*_):
        raise RuntimeError("of nobody's making")

    async with running(max_waiting=1) as world:
        with monkeypatch.context() as patch:
            patch.setattr(type(world.admissions._grammars), "compiled", broken)
            never = await world.admissions.admit(request(0), "")
        assert (never.outcome, never.failure.reason) == (AdmissionOutcome.NEVER, "INTERNAL")
        assert "RuntimeError" in never.failure.message and "making" not in never.failure.message
        assert (await world.admissions.admit(request(0), "")).outcome is AdmissionOutcome.ADMITTED
        answers = await asyncio.gather(*(world.admissions.admit(request(1), "") for _ in range(3)))
        assert [answer.outcome for answer in answers] == [AdmissionOutcome.LATER] * 3
        never = await world.admissions.admit(request(2, prompt_tokens=100), "")
        assert (never.outcome, never.failure.reason) == (AdmissionOutcome.NEVER, "TOO_LARGE")
        await world.settle()
        assert set(world.publisher.logs) == set(world.sequences) == {request(0).seq_id}


OPERATIONS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 2), st.integers(1, 4), st.sampled_from([3, 3, 3, 100])),
    st.tuples(st.just("give up"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("drop"), st.integers(0, 2)),
    st.tuples(st.just("turns"), st.integers(1, 4)),
    st.tuples(st.just("engine")),
)


@pytest.mark.scaled
@settings(max_examples=draws(30, 800))
@given(st.lists(OPERATIONS, max_size=25), st.sampled_from([1, 2, 1000]), st.booleans())
async def test_in_any_order_the_logs_and_the_scheduler_agree(operations, max_waiting, runs):
    """Admissions of the same sequences, at the same and other epochs, given up or not, while others end."""

    async def scenario(world: World) -> None:
        if runs:
            world.engine.control.grant_steps(0)
        calls: list[asyncio.Task] = []
        for operation in operations:
            match operation:
                case ("admit", number, epoch, prompt_tokens):
                    admission = world.admissions.admit(request(number, epoch, prompt_tokens=prompt_tokens), "")
                    calls.append(asyncio.create_task(admission))
                case ("give up", index) if calls:
                    calls[index % len(calls)].cancel()
                case ("cancel", number, epoch):
                    world.admissions.cancel([(request(number).seq_id, epoch)])
                case ("drop", number) if (entry := world.publisher.logs.get(request(number).seq_id)) is not None:
                    world.port.tell(lambda scheduler, gone=entry.sequence: scheduler.drop(gone))
                    world.publisher.forget_log(entry)
                case ("turns", count):
                    await turns(count)
                case ("engine",):
                    await asyncio.wrap_future(world.engine.port.post(lambda _: None))
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelling() or call.result() for call in calls)  # one that gives up takes nobody with it
        while world.admissions._deciding:
            await asyncio.gather(*world.admissions._deciding.values(), return_exceptions=True)
        await world.settle()
        if runs:
            await until(lambda: not world.sequences and not world.publisher.logs)  # a later step tells a cancel
        else:
            cancelled = {item.seq_id for item in world.parts.workload.pending}
            logs = {seq_id: entry.sequence for seq_id, entry in world.publisher.logs.items() if seq_id not in cancelled}
            assert logs == dict(world.sequences)
        for (seq_id, _, _), tokens in world.told().items():
            assert tokens == fake_oracle([int(seq_id, 16) + 1] * 3, 6, info=world.runner.info)[: len(tokens)]

    async with running(max_waiting) as world:
        await scenario(world)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
