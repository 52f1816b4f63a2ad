"""Which migrations a drain begins, and what it makes of those that do not begin or fail."""

import asyncio
from types import SimpleNamespace

import pytest
from waiting import until

from gpu_worker.migration.source.migration_progress import MigrationOutcome
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from gpu_worker.scheduling.freezer import PromptProgress
from gpu_worker.serving.leaving import sequence_mover
from gpu_worker.serving.leaving.sequence_mover import SequenceMover
from octavo.request.errors import StaleEpoch, TransferFailed
from octavo.request.ids import SequenceId

SEQ = SequenceId("a" * 32)


class Engine:
    """One sequence, which waits to be started. Its migrations go as far as their first question to the engine."""

    epoch = 1
    error: Exception | None = None

    async def prompt_progress(self, seq_id, epoch):
        if self.error is not None:
            raise self.error
        if epoch != self.epoch:
            raise StaleEpoch("another epoch")
        return PromptProgress(False, False, 0)

    async def check_movable(self, seq_id, epoch):
        await asyncio.Event().wait()


class Scene:
    def __init__(self) -> None:
        self.engine = Engine()
        self.publisher = SimpleNamespace(logs={})
        self.admit(1)

        async def close() -> None:
            return None

        worker = SimpleNamespace(
            publisher=self.publisher, engine=self.engine, connections=SimpleNamespace(close=close), incarnation="a"
        )
        self.registry = MigrationRegistry(worker, SimpleNamespace(), 4)
        self.mover = SequenceMover(self.registry, self.publisher)

    def admit(self, epoch: int) -> None:
        self.engine.epoch = epoch
        sequence = SimpleNamespace(seq_id=SEQ, prompt=[1, 2, 3])
        branches = [SimpleNamespace(num_tokens=0, ended=False)]
        self.publisher.logs[SEQ] = SimpleNamespace(
            seq_id=SEQ, epoch=epoch, sequence=sequence, branches=branches, gone=False
        )


@pytest.fixture
async def scene():
    made = Scene()
    yield made
    await made.registry.stop()


async def test_a_migration_of_an_older_epoch_does_not_end_the_drain(scene):
    """It waits for the start of a sequence that has come here again since, and knows nothing of that yet."""
    older = scene.registry.begin(SEQ, 1, during_prefill=True)
    await asyncio.sleep(0)
    scene.admit(2)
    assert scene.mover.move_some() == {SEQ}
    await until(older.done.is_set)
    assert older.outcome is MigrationOutcome.ENDED
    assert scene.mover.move_some() == {SEQ}
    assert scene.registry._under_way[SEQ].epoch == 2


async def test_a_migration_that_goes_on_for_long_fails_once(scene, monkeypatch):
    monkeypatch.setattr(sequence_mover, "PAUSE_S", 60.0)
    progress = scene.registry.begin(SEQ, 1, during_prefill=True)
    for _ in range(sequence_mover.MOST_FAILURES):
        scene.mover.move_some()
    scene.engine.error = TransferFailed("it does not arrive", cause="STALLED")
    await until(progress.done.is_set)
    assert progress.outcome is MigrationOutcome.STAYED
    assert scene.mover.move_some() == {SEQ}, "it is hoped for: it may be tried again"
