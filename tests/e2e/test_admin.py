"""What operators see of a live service."""

import contextlib

import grpc
import pytest

from octavo.client import SamplingParams
from octavo.request import errors
from octavo.v1 import admin_pb2, inference_pb2
from octavo.wire import statuses

LONG = SamplingParams(temperature=0, max_tokens=2000)


async def test_sequences_and_placements_of_what_runs(cluster, client):
    """Asked of either router."""
    streams = [client.generate(range(1, 100), LONG, request_id=f"admin-{n}", priority="bulk") for n in range(3)]
    for stream in streams:
        await anext(stream)
    owners = {worker.incarnation for worker in cluster.workers().values()}
    for router in range(2):
        listed = cluster.admin(router).ListSequences(admin_pb2.ListSequencesRequest()).sequences
        assert {sequence.request_id for sequence in listed} == {"admin-0", "admin-1", "admin-2"}
        assert [sequence.age_ms for sequence in listed] == sorted((s.age_ms for s in listed), reverse=True)
        for sequence in listed:
            assert sequence.state == inference_pb2.REQUEST_STATE_RUNNING
            assert sequence.owner in owners
            assert sequence.epoch == 1
            assert sequence.prompt_tokens == 99
            assert sequence.num_tokens[0] > 0
            assert sequence.priority == inference_pb2.PRIORITY_BULK
        one = cluster.admin(router).ListSequences(admin_pb2.ListSequencesRequest(limit=1)).sequences
        assert len(one) == 1
    by_owner = [cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(owner=o)).sequences for o in owners]
    assert sum(map(len, by_owner)) == 3
    for stream in streams:
        await client.cancel(stream.request_id)
        async for _ in stream:
            pass


async def test_explain_placement(cluster, client):
    await client.complete(range(1, 200), SamplingParams(temperature=0, max_tokens=1), request_id="explained")
    answers = []
    for router in range(2):
        with contextlib.suppress(grpc.RpcError):  # the other one placed it
            answers.append(cluster.admin(router).ExplainPlacement(by_id("explained")))
    assert answers
    assert all(answer.worker_id in ("w0", "w1") for answer in answers)
    what = admin_pb2.ExplainPlacementRequest()
    what.hypothetical.token_ids.ids.extend(range(1, 200))
    answer = cluster.admin().ExplainPlacement(what)
    assert {candidate.worker_id for candidate in answer.candidates} == {"w0", "w1"}
    assert answer.worker_id == answer.candidates[0].worker_id
    for candidate in answer.candidates:
        parts = candidate.prefill_cost + candidate.load_cost + candidate.pressure_cost
        assert candidate.total_cost == pytest.approx(parts)
    what.hypothetical.sampling.temperature = -1
    for bad, error in [
        (what, errors.InvalidArgument),
        (by_id("nobody"), errors.NotFound),
        (None, errors.InvalidArgument),
    ]:
        with pytest.raises(grpc.RpcError) as raised:
            cluster.admin().ExplainPlacement(bad or admin_pb2.ExplainPlacementRequest())
        assert isinstance(statuses.error_from(raised.value), error)


def by_id(request_id):
    return admin_pb2.ExplainPlacementRequest(request_id=request_id)
