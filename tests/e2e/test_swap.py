"""Swap on live streams, from grpcurl: a stream pauses, goes on where it was, and says what it would have said."""

import asyncio

from live.grpcurl import grpcurl, objects
from live.reader import Reader

from octavo.client import SamplingParams

NUM_TOKENS = 1500
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PROMPT = list(range(200, 240))


class Swapper:
    """Swaps one request by grpcurl, with what Admin says of it, on whichever worker has it."""

    def __init__(self, cluster, request_id):
        listed = objects(grpcurl(cluster.admin_endpoints[0], "octavo.v1.Admin/ListSequences", data={}))
        (self._found,) = (each for each in listed[0]["sequences"] if each["request_id"] == request_id)
        self._endpoints = list(cluster.worker_endpoints.values())

    async def __call__(self, operation):
        return await asyncio.to_thread(self._swap, operation)

    def _swap(self, operation):
        names = {name: self._found[name] for name in ("seq_id", "epoch")}
        data = {"items": [{**names, "operation": f"SWAP_OPERATION_{operation}"}]}
        for endpoint in self._endpoints:
            (result,) = objects(grpcurl(endpoint, "octavo.internal.v1.Worker/Swap", data=data))[0]["results"]
            if result.get("failure", {}).get("reason") != "NOT_FOUND":
                self._endpoints = [endpoint]
                break
        assert result["seq_id"] == names["seq_id"] and "failure" not in result, result
        return result.get("num_blocks", 0)


async def test_a_stream_pauses_and_goes_on(cluster, client, oracle):
    reader = Reader(client.generate(PROMPT, PARAMS, request_id="paused"))
    await reader.until(20)
    swap = await asyncio.to_thread(Swapper, cluster, "paused")
    num_out = await swap("OUT")
    assert num_out >= 3
    assert await swap("OUT") == 0, "out already"
    await asyncio.sleep(0.5)  # the tokens from before are here by now
    num_tokens = reader.num_tokens
    await asyncio.sleep(4.0)  # longer than a preempted sequence is kept from its blocks
    assert reader.num_tokens == num_tokens < NUM_TOKENS, "it came back by itself"
    assert sum(cluster.load(name).num_swapped for name in cluster.worker_endpoints) == 1
    assert sum(cluster.load(name).num_used_blocks for name in cluster.worker_endpoints) == 0
    assert await swap("IN") == num_out
    await reader.until(num_tokens + 20)
    assert await swap("DROP") > num_out
    await asyncio.wait_for(reader.task, 60)
    assert reader.tokens == {0: list(oracle.tokens(PROMPT, NUM_TOKENS))}
