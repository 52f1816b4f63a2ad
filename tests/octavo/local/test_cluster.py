"""The names that `octavo up` gives to the processes of a machine."""

from octavo.local.cluster import Cluster, ClusterSettings, role_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings


def worker_ids(directory, store):
    up = UpSettings(workers=2, grpc_port=0, store=store)
    cluster = Cluster(ClusterSettings(up, RouterSettings(), WorkerSettings(), directory))
    return [worker.worker_id for worker in cluster.state(ready=True).workers]


def test_clusters_on_one_store_have_different_ids(tmp_path):
    assert worker_ids(tmp_path, "") == ["worker-0", "worker-1"]
    ours, others = (worker_ids(tmp_path, "redis://127.0.0.1:1") for _ in range(2))
    assert len({*ours, *others}) == 4
    assert ours[1].startswith("worker-1-")


def test_prefill_workers_come_before_decode_workers():
    up = UpSettings(workers=4, prefill_workers=1, decode_workers=2)
    assert [role_of(index, up) for index in range(4)] == ["prefill", "decode", "decode", "both"]
    assert role_of(0, UpSettings()) == "both"
