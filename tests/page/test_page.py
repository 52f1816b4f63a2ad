"""The page shows what Admin says at that moment, while sequences move, workers drain and die, and routers go."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from live.process import wait_until

from octavo.v1 import admin_pb2, inference_pb2

pytestmark = pytest.mark.timeout(600)

WAIT_S = 120.0
LOOK = "test.look()"
HOW = {
    admin_pb2.MOVE_KIND_MIGRATED: "with its blocks",
    admin_pb2.MOVE_KIND_TAKEN_OVER: "its worker was lost",
    admin_pb2.MOVE_KIND_REPLACED: "given back",
}
FIELDS = ("num_sequences", "num_waiting", "num_swapped", "num_used_blocks", "num_cached_blocks", "num_free_blocks")


def how(move: admin_pb2.SequenceMove) -> str:
    return f"{HOW[move.kind]}: {move.seen}" if move.seen else HOW[move.kind]


def state_of(worker: admin_pb2.WorkerStatus) -> str:
    if worker.reason == "lost":
        return "lost"
    if worker.load.draining:
        return "draining"
    return "available" if worker.available else "unavailable"


def expected(view: admin_pb2.WatchClusterResponse) -> dict[str, Any]:
    """What the page shows of a view."""
    names = {worker.incarnation: worker.worker_id for worker in view.workers}
    states = {inference_pb2.REQUEST_STATE_QUEUED: "waiting", inference_pb2.REQUEST_STATE_RUNNING: "running"}
    sequences = []
    for each in view.sequences:
        owner = names.get(each.owner, each.owner) or "–"
        target = names.get(each.moving_to, each.moving_to)
        sequences.append(
            [
                each.request_id,
                each.tenant or "–",
                "moving" if target else states[each.state],
                f"{owner} → {target}" if target else owner,
                f"{each.prompt_tokens:,}",
                f"{sum(each.num_tokens):,}",
            ]
        )
    return {
        "workers": [
            {
                "name": worker.worker_id,
                "incarnation": worker.incarnation or f"{worker.worker_id} {worker.endpoint}",
                "state": state_of(worker),
                "badge": state_of(worker),
                "map": f"Blocks: {worker.load.num_used_blocks} used, {worker.load.num_cached_blocks} in the prefix "
                f"cache, {worker.load.num_free_blocks} free, of {worker.num_blocks}",
                **{field: getattr(worker.load, field) for field in FIELDS},
            }
            for worker in view.workers
        ],
        "moves": [[move.request_id, move.from_worker, move.to_worker, how(move)] for move in view.moves],
        "tenants": [
            [each.tenant or "(none)", f"{each.num_queued:,}", f"{each.queued_tokens:,}"] for each in view.queue.tenants
        ],
        "sequences": sequences,
        "queued": view.queue.num_queued,
        "queued_tokens": view.queue.queued_tokens,
        "streams": view.num_streams,
        "hits": sum(worker.load.prefix_hit_tokens for worker in view.workers),
    }


class Eye:
    """Looks at the page, and compares each look with the view that it shows."""

    def __init__(self, browser: Any, watched: Any) -> None:
        self._browser = browser
        self._views = watched.views
        self.num_compared = 0
        browser.ask("open", url=watched.url, width=1280, height=900, scheme="light")

    def look(self) -> dict[str, Any]:
        """What the page shows. If the view that it shows is known, it is compared with it."""
        shown: dict[str, Any] = self._browser.evaluate(LOOK)
        deadline = time.monotonic() + 2
        while (view := self._views.find(shown["at"])) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if view is not None and view.HasField("queue"):
            told = {
                **shown,
                "moves": [row[:4] for row in shown["moves"]],
                "tenants": [row[:3] for row in shown["tenants"]],
                "sequences": [row[:6] for row in shown["sequences"]],
            }
            assert {name: told[name] for name in expected(view)} == expected(view)
            self.num_compared += 1
        return shown

    def wait(self, holds: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}

        def seen() -> bool:
            nonlocal shown
            shown = self.look()
            return bool(holds(shown))

        wait_until(seen, WAIT_S, what)
        return shown

    def states(self) -> dict[str, str]:
        return {worker["name"]: worker["state"] for worker in self.look()["workers"]}


@pytest.fixture
def eye(browser: Any, watched: Any) -> Eye:
    made = Eye(browser, watched)
    made.wait(
        lambda shown: shown["connection"] == "Live" and len(shown["workers"]) == 3, "the page shows three workers"
    )
    return made


def running_on(shown: dict[str, Any], worker: str) -> list[str]:
    return [row[0] for row in shown["sequences"] if row[2] == "running" and row[3] == worker]


def migrate_one(watched: Any, eye: Eye, source: str, target: str) -> str:
    """Moves one of the source's requests to the target."""
    for request_id in running_on(eye.wait(lambda shown: running_on(shown, source), f"{source} runs something"), source):
        try:
            request = admin_pb2.MigrateRequest(request_id=request_id, worker_id=target)
            watched.cluster.admin().Migrate(request, timeout=20)
        except grpc.RpcError:
            continue  # it has ended, or the target is full
        return request_id
    return ""


def test_the_page_says_what_the_admin_service_says(browser, watched, eye):
    """Through a migration, a drain, a kill and their ends; each look is compared with the view that was shown."""
    admin = watched.cluster.admin()
    eye.wait(lambda shown: shown["queued"] > 0 and shown["tenants"], "something waits: 14 requests, 12 places")
    eye.wait(lambda shown: shown["hits"] > 0 and shown["ttft"] > 0, "requests are answered, with prefix hits")

    browser.evaluate("test.forgetShifts()")

    moved: list[str] = []
    wait_until(lambda: moved.append(migrate_one(watched, eye, "w0", "w1")) or moved[-1], WAIT_S, "a request moves")
    wanted = [moved[-1], "w0", "w1", "with its blocks"]
    shown = eye.wait(lambda shown: any(row[:4] == wanted for row in shown["moves"]), "the move is shown")
    assert moved[-1][:12] in shown["flights"]

    drain = admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="w1", grace_ms=30_000))
    eye.wait(lambda shown: eye.states()["w1"] == "draining", "the drain is shown")
    assert list(drain)[-1].num_left == 0
    eye.wait(
        lambda shown: next(w for w in shown["workers"] if w["name"] == "w1")["num_sequences"] == 0, "w1 is shown empty"
    )
    shown = eye.wait(lambda shown: any(row[1] == "w1" for row in shown["moves"]), "what left w1 is shown")
    assert not running_on(shown, "w1")
    list(admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="w1", undo=True)))
    eye.wait(lambda shown: eye.states()["w1"] == "available", "the end of the drain is shown")

    assert eye.look()["shifts"] < 0.02, "what is on the page jumps"  # until the number of workers changes

    eye.wait(lambda shown: running_on(shown, "w2"), "w2 runs something")
    watched.cluster.kill("w2")
    eye.wait(lambda shown: eye.states().get("w2") in ("lost", None), "the death is shown")
    eye.wait(
        lambda shown: any(row[1] == "w2" and row[3].startswith("its worker was lost") for row in shown["moves"]),
        "what was taken over is shown",
    )
    watched.cluster.revive()
    eye.wait(lambda shown: eye.states() == dict.fromkeys(("w0", "w1", "w2"), "available"), "the new process is shown")

    assert eye.num_compared > 20
    assert browser.ask("problems") == []
    assert {url.split("/")[2] for url in browser.ask("requests") if not url.startswith("data:")} == {
        watched.url.split("/")[2]
    }


def test_a_page_that_loses_its_router_says_so_and_comes_back(browser, watched, eye):
    watched.cluster.kill("r0")
    shown = eye.wait(lambda shown: "does not answer" in shown["trouble"], "the loss is said")
    assert shown["connection"] == "Reconnecting …"
    assert browser.evaluate("document.body.classList.contains('stale')")
    before = shown["at"]
    watched.cluster.spawn("r0")
    shown = eye.wait(lambda shown: shown["connection"] == "Live" and not shown["trouble"], "the page is back")
    assert shown["at"] < before, "the router has started anew"
    watched.cluster.wait_ready()
    eye.wait(lambda shown: len(shown["workers"]) == 3 and shown["streams"] > 0, "the new router's state is shown")


def test_a_store_that_is_away_is_said(browser, watched, eye):
    watched.cluster.store.pause()
    try:
        shown = eye.wait(lambda shown: "store" in shown["trouble"], "the store's silence is said")
        assert shown["connection"] == "Live"
        assert len(shown["workers"]) == 3
    finally:
        watched.cluster.store.resume()
    eye.wait(lambda shown: not shown["trouble"], "the store is back")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_scrolls_sideways(browser, watched, eye, width):
    browser.ask("resize", width=width, height=780)
    eye.wait(lambda shown: shown["sequences"] and shown["ttft"] > 0, "something is shown")
    wide = browser.evaluate("test.tooWide()")
    assert wide == []
    if folder := os.environ.get("OCTAVO_TEST_PICTURES"):
        browser.ask("screenshot", path=str(Path(folder) / f"page-{width}.png"), full=True)


def test_the_keyboard_reaches_everything(browser, watched, eye):
    """Each element that can have the focus gets it by Tab, in the order of the page, and shows it."""
    all_of_them = browser.evaluate("test.focusable()")
    assert len(all_of_them) >= 9
    reached = []
    for _ in all_of_them:
        browser.ask("press", key="Tab")
        name, outline = browser.evaluate("test.focused()")
        assert outline == "solid", f"nobody sees that {name} has the focus"
        reached.append(name)
    assert reached == all_of_them

    browser.evaluate("document.querySelector('input[name=span]:checked').focus()")
    browser.ask("press", key="ArrowRight")
    assert browser.evaluate("document.querySelector('input[name=span]:checked').value") == "all"
    browser.evaluate("document.getElementById('theme').focus()")
    themes = [browser.evaluate("getComputedStyle(document.documentElement).colorScheme")]
    for _ in range(2):
        browser.ask("press", key="Enter")
        themes.append(browser.evaluate("getComputedStyle(document.documentElement).colorScheme"))
    assert themes == ["light dark", "light", "dark"]

    request_id = eye.wait(lambda shown: shown["sequences"], "sequences are shown")["sequences"][0][0]
    browser.evaluate("document.getElementById('filter').focus()")
    browser.ask("type", text=request_id)
    assert {row[0] for row in browser.evaluate(LOOK)["sequences"]} <= {request_id}


def test_screen_readers_get_names_and_tables(browser, watched, eye):
    eye.wait(lambda shown: shown["sequences"], "sequences are shown")
    found = browser.evaluate("test.names()")
    assert found["unnamed"] == []
    assert found["lost"] == 0
    assert found["cells"]
    assert found["live"] == ["connection", "trouble"], "more would talk without end"
    steps = zip([0, *found["headings"]], found["headings"], strict=False)
    assert all(after <= before + 1 for before, after in steps), "a level of headings is left out"
    assert found["language"] == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(browser, watched, eye, scheme):
    """4.5 to 1 at least, for every text on the colour behind it."""
    browser.ask("open", url=watched.url, width=1280, height=900, scheme=scheme)
    eye.wait(lambda shown: shown["sequences"], "something is shown")
    poor = browser.evaluate("test.poorContrast()")
    assert poor == []
    if folder := os.environ.get("OCTAVO_TEST_PICTURES"):
        browser.ask("screenshot", path=str(Path(folder) / f"page-{scheme}.png"), full=True)
