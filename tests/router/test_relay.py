"""Tokens that wait travel together: for clients that read slowly, and in waves of a busy router."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams
from octavo.v1 import inference_pb2, types_pb2
from octavo.wire.public import sampling_to_wire
from router.streaming import session

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(temperature=0.0, max_tokens=400)


def request(request_id, params=GREEDY):
    ids = types_pb2.TokenIds(ids=PROMPT)
    return inference_pb2.GenerateRequest(request_id=request_id, token_ids=ids, sampling=sampling_to_wire(params))


@pytest.mark.parametrize("limit", [session.MAX_INBOX_TOKENS, 50])
async def test_slow_readers_get_few_large_events(world, oracle, monkeypatch, limit):
    """Beyond the limit, what waits is dropped and read from the journals."""
    monkeypatch.setattr(session, "MAX_INBOX_TOKENS", limit)
    await world.worker(FakeRunner(step_s=0.0))
    router = await world.router()
    await world.ready()
    largest, deliver = 0, router.sessions.deliver_item

    def deliver_item(item) -> bool:
        nonlocal largest
        largest = max(largest, len(item.token_ids))
        return deliver(item)

    router.sessions.deliver_item = deliver_item
    context = SimpleNamespace(time_remaining=lambda: None, send_initial_metadata=AsyncMock())
    events = router.inference.Generate(request("slow"), context)  # gRPC asks for the next one when one is sent
    tokens, num_events = list((await anext(events)).token_ids), 1
    (slow,) = router.sessions._all()
    most = 0

    def has_ended() -> bool:
        nonlocal most
        most = max(most, slow._inbox.num_tokens)
        return world.entry("slow").record.state.ended

    await world.until(has_ended, 60)
    await asyncio.sleep(0.2)  # the last items come
    async for event in events:
        tokens += event.token_ids
        num_events += 1
    ((expected, _, _),) = oracle.outputs(PROMPT, GREEDY)
    assert tuple(tokens) == expected
    assert num_events < 20
    assert most <= max(limit, largest)
