"""Moves a request of a cluster to one of its workers, as an operator does."""

from live.cluster import Cluster

from octavo.v1 import admin_pb2
from octavo.wire import statuses


def migrate(cluster: Cluster, request_id: str, name: str) -> admin_pb2.MigrateResponse | None:
    """None if it is there already."""
    listed = cluster.admin().ListSequences(admin_pb2.ListSequencesRequest(), timeout=10).sequences
    owner = next(each.owner for each in listed if each.request_id == request_id)
    if cluster.workers()[name].incarnation == owner:
        return None
    with statuses.serving_errors():
        return cluster.admin().Migrate(admin_pb2.MigrateRequest(request_id=request_id, worker_id=name), timeout=30)
