"""What a caller has obtained of the engine is given back, whenever the caller goes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from scheduler_parts import SchedulerParts
from waiting import until

from gpu_worker.engine.block_port import BlockPort, checked_sequence
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=100, best_of=1, seed=1, ignore_eos=True)
ADMISSION = Admission(seq_id=SequenceId("1" * 32), epoch=1, prompt=[2] * 11, sampling=PARAMS)


class Scene:
    """An engine that has nine tokens of a sequence."""

    def __init__(self) -> None:
        runner = FakeRunner(block_size=4, num_blocks=16, num_host_blocks=4, context_tokens=128)
        config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=8, watermark=0.0)
        self.parts = SchedulerParts(config, runner.info)
        self.steps: list[object] = []
        self.engine = self.parts.engine(runner, self.steps.append)
        self.blocks = BlockPort(self.parts.port, self.parts.workload)

    async def start(self) -> None:
        self.engine.start()
        sequence = checked_sequence(ADMISSION, self.blocks.info)
        assert (await self.parts.port.ask(lambda scheduler: scheduler.admit(sequence))).admitted
        self.engine.control.grant_steps(9)
        await until(lambda: len(self.steps) == 9)

    async def holds_nothing(self) -> None:
        for _ in range(2):
            await self.parts.port.ask(lambda scheduler: scheduler.check_state())
        assert not self.parts.workload.frozen
        assert not self.parts.workload.tables.device.num_reserved


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    await made.start()
    yield made
    await asyncio.to_thread(made.engine.stop)


async def test_a_branch_that_goes_on_has_hashes(scene: Scene) -> None:
    """The last token of a branch is not computed yet, and a branch that has ended needs no block."""
    params, outputs = replace(PARAMS, temperature=1.0, n=3, best_of=3), [[9] * 3, [9] * 4, [9] * 7]
    admission = replace(ADMISSION, prompt=[2] * 5, sampling=params, outputs=outputs, finished_branches=[1])
    hashes = scene.blocks.branch_hashes(admission)
    assert [len(each) for each in hashes] == [(5 + 3 - 1) // 4, (5 + 7 - 1) // 4] == [1, 2]
    assert hashes[0][0] == hashes[1][0]
    salted = scene.blocks.branch_hashes(replace(admission, salt="other"))
    assert not {h for each in hashes for h in each} & {h for each in salted for h in each}
    with pytest.raises(InvalidArgument, match="prompt"):
        scene.blocks.branch_hashes(replace(admission, prompt=[10**6]))


async def test_a_cancelled_caller_holds_nothing(scene: Scene) -> None:
    """Whether its command has had its turn or not."""
    blocks, gate = scene.blocks, threading.Event()
    hashes = blocks.branch_hashes(ADMISSION)
    for waits in (True, False):
        if waits:
            scene.parts.port.post(lambda _: gate.wait(20))
        freezing = blocks.freeze_and_pin(ADMISSION.seq_id, 1)
        coroutines = (freezing, blocks.pin_blocks(hashes[0]), blocks.hold_import(hashes))
        calls = [asyncio.create_task(coroutine) for coroutine in coroutines]
        await asyncio.sleep(0)  # the commands are posted
        if not waits:
            scene.parts.port.post(lambda _: None).result(20)  # and done, while this loop does not go round
        for call in calls:
            call.cancel()
        gate.set()
        await asyncio.gather(*calls, return_exceptions=True)
        await scene.holds_nothing()


async def test_giving_back_to_an_ended_engine_succeeds(scene: Scene) -> None:
    pinned, held = await scene.blocks.pin_blocks([]), await scene.blocks.hold_import([])
    await asyncio.to_thread(scene.engine.stop)
    await scene.blocks.unpin(pinned)
    await scene.blocks.release_import(held)
    scene.parts.port.tell(lambda scheduler: scheduler.check_state())
