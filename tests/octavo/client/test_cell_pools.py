"""A request and everything about it go to one cell, whatever breaks; calls about no request go anywhere."""

import pytest

from octavo.client import AsyncClient, RetryPolicy
from octavo.request import errors
from octavo.request.ids import cell_number

QUICK = RetryPolicy(progress_timeout_s=5.0, backoff_base_s=0.001, backoff_cap_s=0.01)
IDS = [f"request-{number}" for number in range(8)]


async def test_a_broken_stream_stays_in_its_cell(make_router, serve, script):
    cells = [make_router(), make_router()]
    async with serve(cells[0]) as a, serve(cells[1]) as b, AsyncClient(f"{a},{a};{b},{b}", policy=QUICK) as client:
        for request_id in IDS:
            mine, other = (cells[cell_number(request_id, 2) ^ flip] for flip in (0, 1))
            mine.scripts.append(script(at=2, fault="UNAVAILABLE"))
            before = len(other.calls)
            stream = client.generate("hello", request_id=request_id)
            assert [token async for event in stream for token in event.token_ids] == mine.oracle[0]
            assert [method for method, _ in mine.calls[-2:]] == ["Generate", "Attach"]
            assert stream.num_reattaches == 1
            await client.get(request_id)
            await client.cancel(request_id)
            assert mine.cancelled[-1] == request_id
            assert len(other.calls) == before
    assert {cell_number(each, 2) for each in IDS} == {0, 1}  # both cells were asked


async def test_a_resume_token_needs_its_request_id(make_router, serve):
    cells = [make_router(), make_router()]
    async with serve(cells[0]) as a, serve(cells[1]) as b, AsyncClient([[a], [b]]) as client:
        for request_id in IDS:
            mine = cells[cell_number(request_id, 2)]
            async with client.generate("hello", request_id=request_id) as stream:
                first = await anext(stream)
            with pytest.raises(errors.InvalidArgument, match="names the cell") as refused:
                client.attach(resume_token=stream.resume_token)
            assert refused.value.field == "request_id"
            rest = client.attach(request_id, resume_token=stream.resume_token)
            tokens = [*first.token_ids, *[token async for event in rest for token in event.token_ids]]
            assert tokens == mine.oracle[0]


async def test_one_reachable_cell_is_enough_to_connect(make_router, serve):
    async with serve(make_router()) as endpoint, AsyncClient(f"127.0.0.1:1;{endpoint}") as client:
        await client.connect(5.0)
    async with AsyncClient("127.0.0.1:1;127.0.0.1:2") as client:
        with pytest.raises(errors.Unreachable, match="not connected"):
            await client.connect(0.3)
