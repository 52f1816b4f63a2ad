"""The names that `octavo up` gives to the processes of a machine."""

import socket
from pathlib import Path

from octavo.cli.cluster import HTTP_OFFSET, Cluster, ClusterSettings, http_ports, role_of
from octavo.settings import RouterSettings, UpSettings, WorkerSettings


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


def test_http_is_on_a_port_that_can_be_told_once():
    free = [30_001, 30_002]
    assert http_ports(UpSettings(grpc_port=0, routers=2), free) == free
    assert http_ports(UpSettings(grpc_port=60_000, routers=2), free) == free
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert http_ports(UpSettings(grpc_port=port - HTTP_OFFSET, routers=1), [30_001]) == [30_001]
    assert http_ports(UpSettings(grpc_port=port - HTTP_OFFSET, routers=1), [30_001]) == [port]
