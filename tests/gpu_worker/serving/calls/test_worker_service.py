"""The Worker service over real gRPC in one process: grants, half-closes, observers, streams that die or do not read."""

import asyncio
from collections.abc import AsyncIterator, Awaitable

import grpc
import pytest
from waiting import until
from worker_service import ADMITTED, Service, StepCall, admission, tokens_of

from gpu_worker.journal import step_subscription
from gpu_worker.serving.calls import step_handler
from gpu_worker.testing.fake_runner import fake_oracle
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request import errors
from octavo.wire import statuses


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    await made.start()
    made.service.serve(made.served)
    yield made
    await made.stop()


# Before it is ready


async def test_a_worker_that_still_loads_says_so_to_every_call():
    made = Service()
    await made.start()
    for call in (
        made.stub.Hello(worker_pb2.HelloRequest()),
        made.stub.Schedule(worker_pb2.ScheduleRequest(admissions=[admission()])),
        made.stub.Swap(worker_pb2.SwapRequest()),
        made.stub.Cancel(worker_pb2.WorkerCancelRequest()),
        made.stub.Watch(worker_pb2.WatchRequest()).read(),
        made.step().read(),
    ):
        error = await refusal(call)
        assert isinstance(error, errors.Loading) and error.retry_after_ms > 0
    made.service.serve(made.served)
    assert (await made.stub.Hello(worker_pb2.HelloRequest())).model == "fake"
    await made.stop()


# Grants


async def test_finite_grants_of_several_streams_run_and_report_exactly_their_steps(service):
    assert await service.schedule(admission(max_tokens=1000)) == [ADMITTED]
    counts = {1: 1, 2: 3, 3: 7}
    calls = {number: await service.step().open(f"r{number}") for number in counts}
    for number, call in calls.items():
        await call.grant(counts[number])
    results = dict(zip(calls, await asyncio.gather(*(call.rest() for call in calls.values())), strict=True))
    assert {number: len(found) for number, found in results.items()} == counts
    step_ids = [result.step_id for found in results.values() for result in found]
    assert len(set(step_ids)) == sum(counts.values())
    assert service.engine.times.num_steps == sum(counts.values())


async def test_pause_ends_streams_that_wait_for_steps_which_will_not_come(service):
    service.engine.control.hold_steps(True)  # as while the store is away
    waiting = await (await service.step().open("r1")).grant(100)
    end = asyncio.create_task(waiting.rest())
    await until(lambda: any(stream.num_awaited == 100 for stream in service.publisher.subscriptions.values()))
    assert not end.done()
    await service.step().send(pause=worker_pb2.Pause())
    assert await end == []
    service.engine.control.hold_steps(False)
    await service.schedule(admission())
    await asyncio.sleep(0.05)
    assert service.engine.times.num_steps == 0


async def test_a_bad_command_ends_its_stream_alone(service):
    bystander = await service.step().open("bystander")
    grants = [{"grant": worker_pb2.Grant(steps=steps)} for steps in (2**32 - 1, 2049)]
    routers = [{"open": worker_pb2.Open(router_id=name)} for name in ("", "x" * 129, "a\nb")]
    streams = [await service.step().send(**command) for command in ({}, *grants, *routers)]
    found = await asyncio.gather(*(stream.error() for stream in streams))
    assert all(isinstance(error, errors.InvalidArgument) for error in found)
    assert [error.field for error in found] == ["command", *["grant.steps"] * 2, *["open.router_id"] * 3]
    await bystander.grant(1)
    assert (await bystander.read()).step_id
    bystander.call.cancel()
    await until(lambda: not service.publisher.subscriptions)


# Who is told


async def test_a_stream_that_is_not_read_is_cut_off_and_others_are_not(service, monkeypatch):
    """The slow one's messages fill its connection's window first, then its bounded queue."""
    monkeypatch.setattr(step_subscription, "MAX_PENDING_MESSAGES", 50)
    service.runner.step_s = 0.003
    apart = grpc.aio.insecure_channel(
        service.endpoint, options=[("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    )
    slow = await StepCall(worker_pb2_grpc.WorkerStub(apart)).open("slow")  # as every router, on its own connection
    fast = await service.step().open("fast")
    await until(lambda: len(service.publisher._routers) == 2)
    prompt = tuple(range(1, 10))
    for number in range(8):
        item = admission(number, prompt, max_tokens=4000, logprobs=20)
        await service.schedule(item, router_id="slow")
        await fast.send(follow=worker_pb2.Follow(seq_id=f"{number:032x}"))
    await fast.grant(0)
    results: list[worker_pb2.StepResult] = []
    while len(service.publisher.subscriptions) == 2:
        results.append(await fast.read())
        assert len(results) < 3900, "the slow one was never cut off"
    assert isinstance(await slow.error(), errors.TooManyStreams)
    results += [await fast.read() for _ in range(10)]
    tokens = tokens_of(results, 3, prompt)
    assert tokens == fake_oracle(prompt, len(tokens), info=service.runner.info)
    assert len(tokens) >= len(results) - 10
    fast.call.cancel()
    await apart.close()


async def test_streams_beyond_the_limit_are_refused(service, monkeypatch):
    monkeypatch.setattr(step_handler, "MAX_STREAMS", 2)
    calls = [await service.step().open(f"r{number}") for number in range(2)]
    await until(lambda: len(service.publisher.subscriptions) == 2)
    assert isinstance(await service.step().error(), errors.TooManyStreams)
    calls[0].call.cancel()
    await until(lambda: len(service.publisher.subscriptions) == 1)
    assert len(await (await service.step().grant(1)).rest()) == 1


async def test_nothing_is_left_of_streams_that_die_in_any_way(service):
    await service.schedule(admission(max_tokens=4000))
    for number in range(12):
        call = await service.step().open(f"r{number % 3}")
        await call.grant(1)
        match number % 3:
            case 0:
                call.call.cancel()
            case 1:
                await call.rest()
            case 2:
                await call.send()
                await call.error()
    await until(lambda: not service.publisher.subscriptions)
    publisher = service.publisher
    assert not (publisher._routers or publisher._observers or publisher.logs[f"{1:032x}"].followers)


# Calls


OUT, IN, DROP = worker_pb2.SWAP_OPERATION_OUT, worker_pb2.SWAP_OPERATION_IN, worker_pb2.SWAP_OPERATION_DROP


async def refusal(call: Awaitable[object]) -> errors.ServingError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return statuses.error_from(raised.value)


async def test_one_bad_item_is_that_items_outcome(service):
    bad = admission(2, prompt=(10**6,))
    outcomes = await service.schedule(admission(1), bad, worker_pb2.Admission(seq_id="?"), admission(1))
    rejected = worker_pb2.ADMISSION_OUTCOME_REJECTED
    assert outcomes == [ADMITTED, rejected, rejected, ADMITTED]
    assert isinstance(await refusal(service.schedule(*[admission()] * 1025)), errors.InvalidArgument)
    await service.schedule(*(admission(number, (5,) * 6) for number in range(3, 6)))
    await (await service.step().grant(2)).rest()
    results = await service.swap((3, OUT), (4, OUT), (9, OUT), (3, 0))  # between two steps
    assert [bool(result.num_blocks) for result in results] == [True] * 2 + [False] * 2
    assert [result.failure.reason for result in results[2:]] == ["NOT_FOUND", "INVALID_ARGUMENT"]


async def test_a_worker_that_drains_takes_and_holds_nothing(service):
    await service.schedule(*(admission(number, (5,) * 6) for number in range(2)))
    await (await service.step().grant(2)).rest()
    assert (await service.swap((0, OUT)))[0].num_blocks
    service.watch.draining = True
    assert isinstance(await refusal(service.schedule(admission(9))), errors.Draining)
    refused, back, dropped = await service.swap((1, OUT), (0, IN), (1, DROP))
    assert refused.failure.reason == "DRAINING" and back.num_blocks and dropped.num_blocks


async def test_watch_sends_a_snapshot_then_what_changes_and_the_load(service):
    watch = service.stub.Watch(worker_pb2.WatchRequest(interval_ms=1))
    first = await watch.read()
    assert first.HasField("snapshot")
    assert (first.load.num_steps, first.event_seq, first.digest) == (0, 0, 0)
    await service.schedule(admission(max_tokens=20))
    await (await service.step().grant(21)).rest()
    hashes, number = set(), 0
    async with asyncio.timeout(20):
        while True:
            message = await watch.read()
            number += len(message.events)
            assert message.event_seq == number
            for event in message.events:
                hashes |= {event.stored[start : start + 16] for start in range(0, len(event.stored), 16)}
            digest = 0
            for block_hash in hashes:
                digest ^= int.from_bytes(block_hash[:8], "little")
            assert digest == message.digest
            if message.load.num_steps == 21 and len(hashes) == (3 + 20 - 1) // 4:  # the load may be ahead of the events
                break
    assert message.load.step_ms > 0
    watch.cancel()
    await until(lambda: not service.watch.watchers._watchers)
