"""A router serves its page, which loads nothing from elsewhere, and says on it what Admin.WatchCluster says."""

import asyncio
import json
import re
from importlib.resources import files

from starlette.requests import Request
from web_pages import get

from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.message_json import message_values
from router.admin import cluster_watch
from router.dashboard.dashboard import FILES, POLICY, StaticFile

TEXTS = {name: (files("router.dashboard") / name).read_text() for name, _ in FILES.values()}
PATHS = ["/", "/dashboard.css", "/dashboard.js", "/cluster", "/cluster/stream"]


async def test_the_page_is_where_monitoring_is(world):
    router = await world.router()
    for path, kind in [("/", "text/html"), ("/dashboard.css", "text/css"), ("/dashboard.js", "text/javascript")]:
        answer = await asyncio.to_thread(get, router.web_endpoint, path)
        assert (answer.status, answer.content_type) == (200, f"{kind}; charset=utf-8")
        assert "octavo" in answer.text or path.endswith("css")
    for path in ("/metrics", "/health"):
        assert (await asyncio.to_thread(get, router.web_endpoint, path)).status in (200, 503)
    for path in PATHS:
        assert (await asyncio.to_thread(get, router.web_endpoint, path, "POST")).status == 405, "it is for reading"


def request_with(**headers):
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


async def test_a_file_is_answered_with_a_strict_policy_and_once():
    file = StaticFile("dashboard.html", "text/html; charset=utf-8")
    answer = await file.answer(request_with())
    assert (answer.status_code, answer.body.decode()) == (200, TEXTS["dashboard.html"])
    assert answer.headers["content-security-policy"] == POLICY
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    directives = dict(each.strip().split(" ", 1) for each in POLICY.split(";"))
    assert directives["default-src"] == directives["frame-ancestors"] == directives["base-uri"] == "'none'"
    assert {directives[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    again = await file.answer(request_with(if_none_match=answer.headers["etag"]))
    assert (again.status_code, again.body) == (304, b"")
    assert (await file.answer(request_with(if_none_match='"old"'))).status_code == 200
    other = await StaticFile("dashboard.css", "text/css").answer(request_with())
    assert other.headers["etag"] != answer.headers["etag"]


INLINE = r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+="
MARKUP = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\("


def test_the_three_files_fit_together_and_load_nothing_else():
    """Texts that a client has chosen, such as the name of a request, never become markup."""
    page, script, style = (TEXTS[f"dashboard.{kind}"] for kind in ("html", "js", "css"))
    assert not re.search(INLINE, page) and not re.search(MARKUP, script)
    for text in TEXTS.values():
        without = text.replace("http://www.w3.org/2000/svg", "")  # a namespace is no address: nobody fetches it
        assert not re.search(r"(https?:)?//[a-z0-9]", re.sub(r"(?m)(^|\s)// .*$|/\*.*?\*/", "", without))
        assert "@import" not in text
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert set(re.findall(r'\$\("([a-z0-9-]+)"\)', script)) <= ids
    assert set(re.findall(r"#([a-z][a-z-]*)(?=[^;{}]*\{)", style)) <= ids
    for table in re.findall(r"<table.*?</thead>", page, re.DOTALL):
        assert table.count('scope="col"') == table.count("<th ") > 0


async def read_events(endpoint, count):
    """The status and headers of the stream, and its first events."""
    reader, writer = await asyncio.open_connection(*endpoint.split(":"))
    try:
        writer.write(f"GET /cluster/stream HTTP/1.1\r\nHost: {endpoint}\r\n\r\n".encode())
        head, events = (await reader.readuntil(b"\r\n\r\n")).decode(), []
        while len(events) < count:
            line = (await reader.readuntil(b"\n")).strip()
            events += [json.loads(line[6:])] if line.startswith(b"data: ") else []
        return head, events
    finally:
        writer.close()


async def test_both_say_what_the_call_says(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "DEFAULT_MS", 60_000)  # one view for all
    await world.start(workers=2)
    [router] = world.routers
    async with open_channel(json.loads(router.lease.member.info)["admin_endpoint"]) as channel:
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


async def test_views_come_until_the_reader_leaves_and_not_for_too_many(world, monkeypatch):
    monkeypatch.setattr(cluster_watch, "DEFAULT_MS", 200)
    router = await world.router()
    _, events = await read_events(router.web_endpoint, 3)
    assert events[0]["up_ms"] < events[1]["up_ms"] < events[2]["up_ms"]
    await world.until(lambda: router.cluster.num_watchers == 0)
    monkeypatch.setattr(cluster_watch, "MAX_WATCHERS", 0)
    for path in ("/cluster", "/cluster/stream"):
        answer = await asyncio.to_thread(get, router.web_endpoint, path)
        assert (answer.status, json.loads(answer.text)["error"]["code"]) == (503, "TOO_MANY_STREAMS")
