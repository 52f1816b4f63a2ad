"""Blocks of a prompt come from a worker that has them, and are computed wherever that worker fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prefixes import NUM_BLOCKS, PARAMS, PREFIX, PROMPT, SIZE, compute, fetches_nothing, lets_go
from worker_pair import PairedWorker, WorkerPair, worker_pair

from gpu_worker.migration.calls.transfer_calls import FetchRequest
from gpu_worker.migration.prefix import block_supplier, prefix_fetcher
from gpu_worker.scheduling.block_exchange import WantedBlock
from octavo.internal.v1 import transfer_pb2, transfer_pb2_grpc
from octavo.process import failpoints
from octavo.request import hashing
from octavo.request.errors import InvalidArgument, Mismatch, NotFound, OutOfBlocks, TooManyMoves
from octavo.request.ids import BlockHash, Incarnation
from octavo.wire import statuses


@pytest.fixture
async def pair() -> AsyncIterator[WorkerPair]:
    """`a` has computed the prefix, and `b` has not."""
    async with worker_pair() as made:
        await compute(made, made.a, PROMPT)
        yield made


async def test_no_block_of_another_salt_is_fetched(pair: WorkerPair) -> None:
    """A tenant gets nothing of another one, even if a router told the worker that there is something to get."""
    b = pair.b
    for salt, num_computed in (("", len(PROMPT) - len(PREFIX)), ("other", len(PROMPT))):
        before = b.runner.num_prefill
        follower = await pair.run(PARAMS, prompt=PROMPT, on=b, hint=(pair.a.incarnation, len(PREFIX)), salt=salt)
        async with asyncio.timeout(60):
            await follower.done.wait()
        await fetches_nothing(b)
        assert b.worker.fetcher.num_fetched == NUM_BLOCKS
        assert b.runner.num_prefill - before == num_computed
    await lets_go(pair)


async def test_two_prompts_at_once_share_one_fetch(pair: WorkerPair) -> None:
    prompts = [(*PREFIX, number, number) for number in (80, 81, 82)]
    await asyncio.gather(*(compute(pair, pair.b, prompt, pair.a.incarnation) for prompt in prompts))
    assert pair.b.runner.num_prefill == 3 * 2
    assert pair.b.worker.fetcher.num_fetched == NUM_BLOCKS
    await lets_go(pair)


def refuse(*_: object) -> None:
    raise OutOfBlocks("no room")


def arm(pair: WorkerPair, asker: PairedWorker, patch: pytest.MonkeyPatch, what: str) -> None:
    """Lets a fetch from `a` go wrong."""
    supplier = pair.a.worker.supplier
    honest = supplier.send_blocks

    async def lie(request: FetchRequest) -> int:
        """Sends blocks in the places of others."""
        hashes = [each.block_hash for each in reversed(request.wanted)]
        wanted = [WantedBlock(each.index, h) for each, h in zip(request.wanted, hashes, strict=True)]
        return await honest(replace(request, wanted=wanted))

    match what:
        case "no room":
            patch.setattr(asker.worker.fetcher._blocks._exchange, "hold", refuse)
        case "too many sends":
            patch.setattr(block_supplier, "MOST_SENDS", 0)
        case "others in their places":
            patch.setattr(supplier, "send_blocks", lie)
        case "never known":
            failpoints.arm("target.seal", "hang")
        case _ if what in ERRORS:
            failpoints.arm(what, "error")


ERRORS = ["source.pinned", "source.opened", "source.sent", "target.seal"]
NOTHING = ["nobody knows the owner", "no room", "too many sends", "others in their places", "never known"]


async def test_whatever_goes_wrong_leaves_the_rest_to_be_computed(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for blocks that do not come, and their places are given back."""
    for number, what in enumerate([*NOTHING, *ERRORS]):
        asker = await pair.add(f"asker{number}")
        owner = "gone" if what == "nobody knows the owner" else pair.a.incarnation
        with monkeypatch.context() as patch:
            arm(pair, asker, patch, what)
            cached = await compute(pair, asker, PROMPT, owner)
        assert not cached or what in ERRORS, what
        assert all(each.reached.is_set() for each in failpoints._armed.values()), what
        failpoints.disarm_all()
        await asker.has_let_go()
        assert what != "too many sends" or not asker.worker.fetcher._speeds._speeds, "a refusal says nothing"
    await lets_go(pair)


async def test_a_worker_that_ends_meanwhile_is_not_waited_for(pair: WorkerPair) -> None:
    owner = await pair.add("c")
    await compute(pair, owner, PROMPT)
    armed = failpoints.arm("source.opened", "hang")
    running = asyncio.create_task(compute(pair, pair.b, PROMPT, owner.incarnation))
    await armed.reached.wait()
    pair.others.remove(owner)
    await owner.stop()
    cached = await running
    assert cached == 0
    await lets_go(pair)


def hashes_of(pair: WorkerPair, prompt: tuple[int, ...]) -> list[BlockHash]:
    info = pair.a.runner.info
    return hashing.block_hashes(hashing.root_key(info.fingerprint, info.layout), prompt, SIZE)


async def test_no_more_fetches_at_once_than_it_may_although_all_were_allowed_before_one_began(pair, monkeypatch):
    monkeypatch.setattr(prefix_fetcher, "MOST_FETCHES", 1)
    fetcher, owner = pair.b.worker.fetcher, Incarnation(pair.a.incarnation)
    other = (*range(200, 200 + len(PREFIX)), 1)
    armed = failpoints.arm("source.pinned", "hang")
    assert all(fetcher.allowed_s(owner, NUM_BLOCKS, 0.0) for _ in range(2))
    first = asyncio.create_task(fetcher.fetch_from(owner, hashes_of(pair, PREFIX), 10.0))
    await armed.reached.wait()
    with pytest.raises(TooManyMoves):
        await fetcher.fetch_from(owner, hashes_of(pair, other), 10.0)
    assert await fetcher.fetch(owner, hashes_of(pair, other), 10.0) == 0
    failpoints.disarm_all()
    assert await first == NUM_BLOCKS
    await lets_go(pair)


async def test_the_setting_ends_asking_and_answering() -> None:
    async with worker_pair(prefix_fetch=False) as pair:
        await compute(pair, pair.a, PROMPT)
        asker = await pair.add("asker", prefix_fetch=True)
        for worker in (pair.b, asker):
            cached = await compute(pair, worker, PROMPT, pair.a.incarnation)
            assert cached == 0
        assert pair.b.worker.fetcher is None


async def test_bad_requests_are_refused_by_name(pair: WorkerPair) -> None:
    info, transfer = pair.a.runner.info, transfer_pb2_grpc.TransferStub(pair.a.channel)
    good = {
        "target": pair.b.incarnation,
        "model_fingerprint": info.fingerprint,
        "kv_layout": info.layout,
        "ticket": 1,
        "secret": bytes(32),
        "port": 1,
        "wanted": [transfer_pb2.WantedBlock(index=0, hash=bytes(16))],
    }
    for changes, error in (
        ({"wanted": []}, InvalidArgument),
        ({"wanted": 2 * good["wanted"]}, InvalidArgument),
        ({"wanted": [transfer_pb2.WantedBlock(index=0, hash=b"x")]}, InvalidArgument),
        ({"secret": b"x"}, InvalidArgument),
        ({"port": 70_000}, InvalidArgument),
        ({"target": ""}, InvalidArgument),
        ({"target": "nobody"}, NotFound),
        ({"model_fingerprint": "other"}, Mismatch),
        ({"kv_layout": "other"}, Mismatch),
        ({"numerics": "other"}, Mismatch),
    ):
        with pytest.raises(error), statuses.serving_errors():
            await transfer.Fetch(transfer_pb2.FetchRequest(**good | changes))
    with pytest.raises(Mismatch), statuses.serving_errors():
        await transfer.ListHot(transfer_pb2.ListHotRequest(model_fingerprint="other", kv_layout=info.layout))
    answer = await transfer.Fetch(transfer_pb2.FetchRequest(**good))
    assert answer.num_blocks == 0, "it has no such block, and does not connect for nothing"
    await lets_go(pair)


# ---- before a worker serves ------------------------------------------------------------------------------------------


async def test_the_blocks_of_several_workers_come_and_half_of_the_device_stays_free() -> None:
    async with worker_pair() as pair:
        prompts = [tuple(range(first, first + 40)) for first in (1, 101, 201, 301)]
        for number, prompt in enumerate(prompts):
            await compute(pair, (pair.a, pair.b)[number % 2], prompt)
        new = await pair.add("new", warms_up=True, num_blocks=44)
        await fetches_nothing(new)
        assert 0 < new.worker.fetcher.num_fetched <= 22
        assert [await compute(pair, new, prompt) for prompt in prompts[2:]] == [36, 36], "what each of them ran last"
        await lets_go(pair)


@pytest.mark.parametrize("action", ["hang", "error"])
async def test_others_that_fail_do_not_keep_a_worker_from_starting(action: str) -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        armed = failpoints.arm("source.pinned", action)
        began = time.monotonic()
        new = await pair.add("new", warms_up=True, warm_up_ms=600)
        assert armed.reached.is_set()
        assert time.monotonic() - began < 8.0
        assert await compute(pair, new, PROMPT) == 0
        await lets_go(pair)


async def test_a_worker_that_is_asked_to_end_while_it_warms_up_ends() -> None:
    async with worker_pair() as pair:
        await compute(pair, pair.a, PROMPT)
        armed = failpoints.arm("source.pinned", "hang")
        new = PairedWorker("new", pair.store, warms_up=True)
        starting = asyncio.create_task(new.start())
        await armed.reached.wait()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await new.worker.leave(asyncio.Event())
        assert await new.worker.stop()
        assert not new.worker.workload.tables.device.num_reserved
        await lets_go(pair)
