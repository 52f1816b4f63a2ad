from collections.abc import AsyncIterator, Iterator

import pytest
from migration_workers import Move, long_params, migration_workers

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
async def move() -> AsyncIterator[Move]:
    async with migration_workers(long_params()) as made:
        yield made
