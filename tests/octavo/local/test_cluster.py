"""The names that `octavo up` gives to the processes of a machine."""

import socket
from pathlib import Path

import pytest

from octavo.local import ports
from octavo.local.cluster import HTTP_OFFSET, WEB_OFFSET, Cluster, ClusterSettings, ports_above, role_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import parse_endpoint


def worker_ids(directory: Path, store: str) -> list[str]:
    up = UpSettings(workers=2, grpc_port=0, store=store)
    cluster = Cluster(ClusterSettings(up, RouterSettings(), WorkerSettings(), directory))
    return [worker.worker_id for worker in cluster.state(ready=True).workers]


def test_workers_of_two_clusters_on_one_store_have_different_ids(tmp_path):
    assert worker_ids(tmp_path, "") == ["worker-0", "worker-1"]
    ours, others = (worker_ids(tmp_path, "redis://127.0.0.1:1") for _ in range(2))
    assert len({*ours, *others}) == 4
    assert ours[1].startswith("worker-1-")


def test_the_first_workers_are_for_prompts_and_the_next_ones_for_outputs():
    up = UpSettings(workers=4, prefill_workers=1, decode_workers=2)
    assert [role_of(index, up) for index in range(4)] == ["prefill", "decode", "decode", "both"]
    assert role_of(0, UpSettings()) == "both"


def test_a_router_is_on_ports_that_can_be_told_once():
    def chosen(grpc_port: int, *free: int) -> list[int]:
        return ports_above(UpSettings(grpc_port=grpc_port, routers=len(free)), HTTP_OFFSET, "127.0.0.1", free)

    assert chosen(0, 30_001, 30_002) == [30_001, 30_002]
    assert chosen(60_000, 30_001, 30_002) == [30_001, 30_002]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert chosen(port - HTTP_OFFSET, 30_001) == [30_001]
    assert chosen(port - HTTP_OFFSET, 30_001) == [port]


def test_the_first_router_has_the_ports_of_a_router_alone():
    """A reader of the documents finds the page, the metrics and OpenAI's API where they say, also with `octavo up`."""
    alone, grpc_port = RouterSettings(), UpSettings().grpc_port
    listeners = [alone.listen, alone.web_listen, alone.http_listen]
    assert [parse_endpoint(name).port for name in listeners] == [
        grpc_port + offset for offset in (0, WEB_OFFSET, HTTP_OFFSET)
    ]


def test_the_page_of_a_router_is_where_it_was_the_last_time(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "is_free", lambda host, port: True)
    up = UpSettings(routers=2, workers=1)
    state = Cluster(ClusterSettings(up, RouterSettings(), WorkerSettings(), tmp_path)).state(ready=True)
    assert [router.web for router in state.routers] == ["http://127.0.0.1:52051", "http://127.0.0.1:52052"]


@pytest.mark.parametrize("long_path", [False, True])  # too long for a socket: the store gets a port then
def test_a_port_that_is_picked_is_that_of_no_other_process(tmp_path, monkeypatch, long_path):
    """Nothing listens on any of them yet, so each port looks free to whoever asks."""
    monkeypatch.setattr(ports, "is_free", lambda host, port: True)
    monkeypatch.setattr(ports.random, "sample", lambda range_, count: list(range_)[:count])
    up = UpSettings(routers=1, workers=1, grpc_port=ports.RANGE.start - WEB_OFFSET)
    folder = tmp_path / ("x" * 100 if long_path else "x")
    state = Cluster(ClusterSettings(up, RouterSettings(), WorkerSettings(), folder)).state(ready=True)
    (router,), (worker,) = state.routers, state.workers
    addresses = [router.endpoint, router.admin_endpoint, router.web, router.http, worker.endpoint, worker.web]
    addresses.append(state.store.url.rsplit("/", 1)[0] if long_path else "unix:0")
    assert router.web == f"http://127.0.0.1:{ports.RANGE.start}"
    assert len({address.rsplit(":", 1)[1] for address in addresses}) == len(addresses)
