"""The names that `octavo up` gives to the processes of a machine."""

from pathlib import Path

from octavo.cli.cluster import Cluster, ClusterSettings
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
