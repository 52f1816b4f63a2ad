"""What must hold of the whole cluster when nothing is left to do."""

from collections.abc import Callable
from typing import Any

from gpu_worker.scheduling.state.load import Load
from simulation.cluster import Cluster


def leaks(cluster: Cluster) -> list[str]:
    """What is still there although every stream has ended. Empty when the cluster is at rest."""
    found: list[str] = []

    def expect_none(where: str, what: object) -> None:
        if what:
            found.append(f"{where}: {what!r:.300}")

    state = cluster.store.state
    alive = [s for s in state._entries.values() if not s.record.state.ended and state.get(s.record.seq_id)]
    expect_none("records that have not ended", [(s.record.request_id, s.record.state, s.record.owner) for s in alive])
    for name in ("queue", "claims", "checks", "deadlines", "detached", "owned", "attached"):
        held = getattr(state, name, None)
        if isinstance(held, dict):
            held = {key: value for key, value in held.items() if value}
        expect_none(f"store.{name}", held)
    expect_none("store.pictures", [name for name, each in state.pictures._kept.items() if each.until_ms is None])
    for name, host in cluster.hosts.items():
        if not host.alive or host.program is None:
            found.append(f"{name} does not run")
        elif name in cluster.router_names:
            router = host.program
            expect_none(f"{name}: sessions", router.sessions._sessions)
            expect_none(f"{name}: attempts to assign", router.assigner._in_progress)
            expect_none(f"{name}: background tasks", router._background._tasks)
        else:
            check_worker(name, host.program, expect_none)
            if host.program.standby_buddy is not None:
                check_standbys(name, host.program, living_workers(cluster), expect_none)
    return found


def living_workers(cluster: Cluster) -> set[str]:
    hosts = (cluster.hosts[name] for name in cluster.worker_names)
    return {host.program.listener.incarnation for host in hosts if host.alive and host.program is not None}


def check_standbys(name: str, worker: Any, living: set[str], expect_none: Callable[[str, object], None]) -> None:
    """What an owner that has died has named stays for a while; what a living one runs no more is kept no longer."""
    expect_none(f"{name}: histories with a buddy", worker.standby_owner.sequences.num_histories)
    histories = worker.standby_buddy.histories
    expect_none(f"{name}: histories kept in vain", living & set(histories.owners))
    histories.check_uses()
    if not histories.owners:
        expect_none(f"{name}: blocks kept in vain", worker.workload.tables.cache.standby)


def check_worker(name: str, worker: Any, expect_none: Callable[[str, object], None]) -> None:
    expect_none(f"{name}: logs", worker.publisher.logs)
    expect_none(f"{name}: sequences", worker.workload.sequences)
    load = Load.of(worker.workload)
    expect_none(f"{name}: blocks in use", load.num_used_blocks)
    expect_none(f"{name}: sequences on their way here", worker.target.num_tickets)
    expect_none(f"{name}: sequences on their way elsewhere", worker.migrations and worker.migrations.moving)
    worker.scheduler.check_state()
