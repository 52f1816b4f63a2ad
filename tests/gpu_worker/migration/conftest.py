from collections.abc import AsyncIterator, Iterator

import pytest
from worker_pair import WorkerPair, worker_pair

from gpu_worker.migration.target import incoming_migration
from octavo.process import failpoints


@pytest.fixture(autouse=True)
def _nothing_armed() -> Iterator[None]:
    yield
    failpoints.disarm_all()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is given up sooner."""
    for name in ("PREPARE_S", "VERIFY_S", "ADMIT_S", "COMMIT_PATIENCE_S"):
        monkeypatch.setattr(incoming_migration, name, 1.0)


@pytest.fixture
async def pair() -> AsyncIterator[WorkerPair]:
    async with worker_pair(speculation="off") as made:  # runs may repeat others
        yield made
