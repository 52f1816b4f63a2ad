"""/cluster and its stream say what Admin.WatchCluster says; a slow reader costs nothing, and a reader may leave."""

import asyncio
import json

import pytest
from web_pages import get

from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.message_json import message_values
from router.admin import cluster_watch


async def read_events(endpoint, count, host=None):
    """The status and headers of the stream, and its first events."""
    reader, writer = await asyncio.open_connection(*endpoint.split(":"))
    try:
        writer.write(f"GET /cluster/stream HTTP/1.1\r\nHost: {host or endpoint}\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        events = []
        while len(events) < count:
            line = (await reader.readuntil(b"\n")).strip()
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
        return head, events
    finally:
        writer.close()


async def test_both_say_what_the_call_says(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "DEFAULT_MS", 60_000)  # one view for all
    await world.start(workers=2)
    [router] = world.routers
    async with open_channel(json.loads(router._member.info)["admin_endpoint"]) as channel:
        call = admin_pb2_grpc.AdminStub(channel).WatchCluster(admin_pb2.WatchClusterRequest())
        told = message_values(await call.read())
        call.cancel()
    answer = await asyncio.to_thread(get, router.web_endpoint, "/cluster")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.text) == told
    head, [event] = await read_events(router.web_endpoint, 1)
    assert event == told
    assert [worker["worker_id"] for worker in event["workers"]] == ["worker-0", "worker-1"]
    assert "content-type: text/event-stream" in head
    assert "cache-control: no-store" in head
    assert "content-security-policy: default-src 'none'" in head


async def test_views_come_until_the_reader_leaves(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "DEFAULT_MS", 200)
    router = await world.router()
    _, events = await read_events(router.web_endpoint, 3)
    assert events[0]["up_ms"] < events[1]["up_ms"] < events[2]["up_ms"]
    await world.until(lambda: router.cluster.num_watchers == 0)


@pytest.mark.parametrize("path", ["/cluster", "/cluster/stream"])
async def test_too_many_readers_are_told_so(world, monkeypatch, path):
    monkeypatch.setattr(cluster_watch, "MAX_WATCHERS", 0)
    router = await world.router()
    answer = await asyncio.to_thread(get, router.web_endpoint, path)
    assert (answer.status, json.loads(answer.text)["error"]["code"]) == (503, "TOO_MANY_STREAMS")
