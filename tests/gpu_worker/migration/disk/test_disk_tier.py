"""Whole workers that share a directory of blocks. Their runners notice each wrong block."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from prefixes import NUM_BLOCKS, PARAMS, PREFIX, PROMPT, SIZE, compute, lets_go
from waiting import until
from worker_pair import WorkerPair, worker_pair

from gpu_worker.migration.disk import disk_writer
from gpu_worker.migration.disk.disk_tier import DiskTier
from gpu_worker.steps.runner import BlocksInPlace
from octavo.request import hashing
from octavo.request.errors import InvalidArgument

# Nothing comes from the other worker, and no guess is counted as a token of a prompt.
SETTINGS = {"prefix_fetch": False, "speculation": "off"}


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerPair]:
    """`a` has computed and written the prefix, and `b` has not."""
    monkeypatch.setattr(disk_writer, "ROUND_S", 0.01)
    async with worker_pair(disk_tier=str(tmp_path), **SETTINGS) as made:
        await compute(made, made.a, PROMPT)
        await until(lambda: tier_of(made.a).writer.num_written >= NUM_BLOCKS)
        yield made
        await lets_go(made)


def tier_of(worker) -> DiskTier:
    assert worker.worker.disk is not None
    return worker.worker.disk


async def test_what_one_wrote_another_reads_and_so_does_a_new_one(pair: WorkerPair) -> None:
    for _ in range(2):  # it is in memory the second time
        assert await compute(pair, pair.b, PROMPT) == len(PREFIX)
        assert tier_of(pair.b).reader.num_read == NUM_BLOCKS
    follower = await pair.run(PARAMS, prompt=PROMPT, on=pair.b, salt="other")
    async with asyncio.timeout(60):
        await follower.done.wait()
    assert tier_of(pair.b).reader.num_read == NUM_BLOCKS, "no block of another salt is read"
    made = await pair.add("c", disk_tier=pair.b._settings.disk_tier, **SETTINGS, warms_up=True)
    assert tier_of(made).reader.num_read >= NUM_BLOCKS
    assert await compute(pair, made, PROMPT) == len(PREFIX)


def remove_files(folder: Path) -> None:
    for file in folder.rglob("[!.]*"):
        if file.is_file():
            file.unlink()


async def test_a_damaged_block_is_computed_and_files_that_are_removed_are_written_again(pair, tmp_path: Path) -> None:
    info, tier = pair.a.runner.info, tier_of(pair.a)
    name = hashing.block_hashes(hashing.root_key(info.fingerprint, info.layout), PREFIX, SIZE)[5].hex()
    sixth = tmp_path / name[:2] / name
    sixth.write_bytes(sixth.read_bytes()[:-1] + b"?")
    assert await compute(pair, pair.b, PROMPT) == 5 * len(PREFIX) // NUM_BLOCKS
    assert tier_of(pair.b).files.num_damaged == 1
    await until(lambda: tier.writer._seen is not None)
    before = tier.writer.num_written
    remove_files(tmp_path)
    await tier.list.look()
    await until(lambda: tier.writer.num_written >= before + NUM_BLOCKS)


async def test_a_slow_disk_holds_nobody_up(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes too late is not waited for; the thread that reads ends before its blocks are free."""
    files, reader = tier_of(pair.b).files, tier_of(pair.b).reader
    read = files.read
    monkeypatch.setattr(files, "read", lambda *arguments: time.sleep(0.2) or read(*arguments))
    monkeypatch.setattr(reader, "allowed_s", lambda *_: 0.05)
    monkeypatch.setattr(reader, "_per_turn", 1)
    assert await compute(pair, pair.b, PROMPT) < len(PREFIX)


async def test_a_worker_may_end_while_it_reads(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    other = await pair.add("c", disk_tier=pair.b._settings.disk_tier, **SETTINGS)
    files, begun = tier_of(other).files, asyncio.Event()
    loop, read = asyncio.get_running_loop(), files.read

    def slowly(*arguments) -> bool:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(files, "read", slowly)
    running = asyncio.create_task(pair.run(PARAMS, prompt=PROMPT, on=other))
    await begun.wait()
    await tier_of(other).close(urgent=True)
    await running
    await other.has_no_pins()


async def test_a_disk_that_fails_costs_no_token(pair: WorkerPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments) -> None:
        raise OSError(28, "No space left on device")

    files, writer = tier_of(pair.b).files, tier_of(pair.b).writer
    monkeypatch.setattr(files, "write", fail)
    monkeypatch.setattr(files, "read", fail)
    assert await compute(pair, pair.b, (*PROMPT, 63, 64)) == 0
    await until(lambda: writer.num_failed == 1)
    assert tier_of(pair.b).reader.num_failed == 1


async def test_what_is_not_written_yet_is_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "ROUND_S", 1000.0)
    async with worker_pair(disk_tier=str(tmp_path), **SETTINGS) as made:
        await compute(made, made.a, PROMPT)
        assert tier_of(made.a).files.num_bytes == 0
    assert tier_of(made.a).writer.num_written >= NUM_BLOCKS


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    memory, others = BlocksInPlace(memoryview(bytearray(4096)), num_blocks=4), cast(Any, None)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="disk_tier: cannot be used"):
        DiskTier(str(tmp_path / "file" / "x"), 1 << 20, others, memory, others, others)
    with pytest.raises(InvalidArgument, match="disk_tier_bytes: is less than a block, which has 1024 bytes"):
        DiskTier(str(tmp_path), 1024, others, memory, others, others)
