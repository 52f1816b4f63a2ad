"""Operators see workers, sequences, and why a request was placed where it is."""

import asyncio
from dataclasses import replace

import pytest

from octavo.request.errors import InvalidArgument, NotFound
from octavo.request.record import WorkerRole
from octavo.request.sampling import SamplingParams
from octavo.v1 import admin_pb2, inference_pb2, types_pb2
from octavo.wire import statuses
from octavo.wire.public import sampling_to_wire
from router.admin.messages import worker_to_wire

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PROMPT = list(range(3, 40))


async def test_placement_is_explained_for_past_and_hypothetical_requests(world):
    await world.start(workers=3)
    router = world.routers[0]
    admin = world.admin()
    await world.client().complete(PROMPT, GREEDY, request_id="past")
    past = await admin.ExplainPlacement(admin_pb2.ExplainPlacementRequest(request_id="past"))
    owner = world.entry("past").record.owner
    assert past.worker_id == router.pool.find_link(owner).worker_id == past.candidates[0].worker_id
    assert len(past.candidates) == 3
    for candidate in past.candidates:
        assert candidate.eligible
        parts = candidate.prefill_cost + candidate.load_cost + candidate.pressure_cost
        assert candidate.total_cost == pytest.approx(parts)
    link = router.pool.links[owner]
    link._watch.on_load = lambda load: None
    link.unusable_reason = "away"
    request = inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=PROMPT), sampling=sampling_to_wire(GREEDY))
    now = await admin.ExplainPlacement(admin_pb2.ExplainPlacementRequest(hypothetical=request))
    assert {c.reason for c in now.candidates if not c.eligible} == {"away"}
    assert now.worker_id != past.worker_id
    assert len(world.entries) == 1  # nothing was accepted for it
    for asked, error in (({"request_id": "never"}, NotFound), ({}, InvalidArgument)):
        with pytest.raises(error), statuses.serving_errors():
            await admin.ExplainPlacement(admin_pb2.ExplainPlacementRequest(**asked))


async def test_sequences_are_listed_while_they_live(world):
    await world.start(workers=2)
    client, admin = world.client(), world.admin()
    streams = [client.generate(PROMPT, replace(GREEDY, max_tokens=2000), request_id=f"s{i}") for i in range(3)]
    for stream in streams:
        await anext(stream)
    reply = await admin.ListSequences(admin_pb2.ListSequencesRequest())
    assert [sequence.request_id for sequence in reply.sequences] == ["s0", "s1", "s2"]
    assert all(sequence.state == inference_pb2.REQUEST_STATE_RUNNING for sequence in reply.sequences)
    assert all(sequence.num_tokens[0] > 0 and sequence.prompt_tokens == len(PROMPT) for sequence in reply.sequences)
    owner = reply.sequences[0].owner
    mine = await admin.ListSequences(admin_pb2.ListSequencesRequest(owner=owner))
    assert {s.request_id for s in mine.sequences} == {s.request_id for s in reply.sequences if s.owner == owner}
    with pytest.raises(InvalidArgument), statuses.serving_errors():
        await admin.ListSequences(admin_pb2.ListSequencesRequest(limit=10_001))
    await asyncio.gather(*(client.cancel(f"s{i}") for i in range(3)))
    for stream in streams:
        await stream.aclose()


async def test_a_worker_is_shown_with_its_role(world):
    for role in WorkerRole:
        await world.worker(role=role)
    router = await world.router()
    await world.ready()
    workers = (await world.admin().ListWorkers(admin_pb2.ListWorkersRequest())).workers
    assert [admin_pb2.WorkerRole.Name(each.role) for each in workers] == [
        f"WORKER_ROLE_{role}" for role in ("BOTH", "PREFILL", "DECODE")
    ]
    link = router.pool.links[workers[0].incarnation]
    link.hello = None
    assert worker_to_wire(link).role == admin_pb2.WORKER_ROLE_UNSPECIFIED, "it has not said it yet"
