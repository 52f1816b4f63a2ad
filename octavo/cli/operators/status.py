"""`octavo status`: the routers, workers and store of the `octavo up` on this machine, or of any admin endpoints."""

import argparse
import asyncio
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cli import connection, deployment, output
from octavo.local.state import ClusterState, ExitHistory, RouterState
from octavo.net.security.roles import PeerRole
from octavo.request.errors import StoreUnavailable
from octavo.settings.options import masked
from octavo.store import connected_store
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.wire.channel import open_channel
from octavo.wire.tls import ClientCredentials

STORE_TIMEOUT_S = 10.0  # all tries together
STORE_TRY_S = 3.0
STARTS_S = 60.0  # a worker that ended so lately is taken to be loading its model
NO_ANSWER = "no answer within"
INFERENCE = "octavo.v1.Inference"
ROLES = {number: name.removeprefix("WORKER_ROLE_").lower() for name, number in admin_pb2.WorkerRole.items() if number}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="show routers, workers and store", description=__doc__)
    connection.add_admin_arguments(parser, run)


def run(args: argparse.Namespace) -> int:
    state = None
    if args.admin_endpoint:
        routers = [RouterState("", None, "", name) for name in deployment.admin_endpoints(args)]
    else:
        state = deployment.running(args, "--admin-endpoint")
        routers = state.routers
    with connection.delayed_notice(args, [router.admin_endpoint for router in routers]):
        status = asyncio.run(_collect(routers, state, args.timeout, deployment.credentials(args, PeerRole.OPERATOR)))
    if args.json:
        output.print_json(status, indent=2)
    else:
        print(_text(status))
    for router in status["routers"]:
        if router["error"]:
            output.print_error(args.command, f"{router['admin_endpoint']}: {router['error']}{_remedy(router, state)}")
    return 0 if any(router["serving"] for router in status["routers"]) else 1


def _remedy(router: dict[str, Any], state: ClusterState | None) -> str:
    """What to do about a router that does not answer. That of an `up` is named: its address is right."""
    if not router["error"].startswith(NO_ANSWER):
        return ""
    if state is None:
        return f": {connection.CORRECT_ADMIN}"
    log = Path(state.state_dir, "logs", f"{router['router_id']}.log")
    return f": {router['router_id']} (pid {router['pid'] or '-'}) starts or hangs; see {log}"


async def _collect(
    routers: list[RouterState], state: ClusterState | None, timeout_s: float, credentials: ClientCredentials
) -> dict[str, Any]:
    """The status of all routers, their workers and the store. Those that do not answer are shown as not serving."""
    answers = await asyncio.gather(*(_ask(router.admin_endpoint, timeout_s, credentials) for router in routers))
    return {
        "up": {name: getattr(state, name) for name in ("pid", "ready", "model", "state_dir")} if state else None,
        "routers": [_router(known, answer) for known, answer in zip(routers, answers, strict=True)],
        "workers": _workers(state, [answer.workers for answer in answers]),
        "store": await _store(state) if state else None,
    }


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """What a router says at its Admin listener: its workers, and whether it would serve a new request; or an error."""

    workers: admin_pb2.ListWorkersResponse
    serving: bool = False
    error: str = ""


async def _ask(endpoint: str, timeout_s: float, credentials: ClientCredentials) -> RouterAnswer:
    async with open_channel(endpoint, credentials=credentials) as channel:
        try:
            serving = await _serves(channel, timeout_s)
            workers = await admin_pb2_grpc.AdminStub(channel).ListWorkers(
                admin_pb2.ListWorkersRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            fault = f"{NO_ANSWER} {timeout_s:g} s" if late else connection.admin_fault(error)
            return RouterAnswer(admin_pb2.ListWorkersResponse(), error=fault)
    return RouterAnswer(workers, serving)


async def _serves(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """What the router's health says of new requests. What does not know the question counts as serving."""
    request = health_pb2.HealthCheckRequest(service=INFERENCE)
    try:
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            return True
        raise
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _store(state: ClusterState) -> dict[str, Any]:
    """What the store says of itself. On a busy machine a first connection may take longer than a try."""
    until, num_tries = time.monotonic() + STORE_TIMEOUT_S, 0
    while True:
        num_tries += 1
        try:
            async with asyncio.timeout(STORE_TRY_S), connected_store(state.store.url) as store:
                depth, serving = await store.queue_depth(), await store.accepting()
            trouble = "" if serving else "it is full, and takes no new requests: see --store-memory-bytes"
            found: dict[str, Any] = {"serving": serving, "trouble": trouble, **asdict(depth)}
            break
        except TimeoutError:
            busy = f"it hangs, or this machine is too busy (load average {os.getloadavg()[0]:.0f})"
            found = {"serving": False, "trouble": f"no answer within {STORE_TIMEOUT_S:g} s, {num_tries} tries: {busy}"}
        except StoreUnavailable as error:
            found = {"serving": False, "trouble": error.message}
            break
        if time.monotonic() + STORE_TRY_S > until:
            break
    return {**asdict(state.store), "url": masked(state.store.url), **found}


def _router(known: RouterState, answer: RouterAnswer) -> dict[str, Any]:
    incarnation = answer.workers.router_id
    known = replace(known, router_id=known.router_id or incarnation)
    told = {"serving": answer.serving, "num_queued": answer.workers.num_queued, "error": answer.error}
    return {**asdict(known), "incarnation": incarnation, **told}


def _workers(state: ClusterState | None, answers: list[admin_pb2.ListWorkersResponse]) -> list[dict[str, Any]]:
    """The status of each worker, by worker_id: what the router with the freshest load report says.

    It includes workers that no router knows now.
    """
    found: dict[str, admin_pb2.WorkerStatus] = {}
    for worker in (worker for answer in answers for worker in answer.workers):
        best = found.get(worker.worker_id)
        if best is None or (worker.available, -worker.load_age_ms) > (best.available, -best.load_age_ms):
            found[worker.worker_id] = worker
    rows = {name: _worker(status) for name, status in found.items()}
    for written in state.workers if state else ():
        if row := rows.get(written.worker_id):
            row |= {"pid": row["pid"] or written.pid, "exits": asdict(written.exits)}
        else:
            reason = _unknown_reason(written.exits)
            rows[written.worker_id] = {**_worker(admin_pb2.WorkerStatus(reason=reason)), **asdict(written)}
    return [rows[name] for name in sorted(rows)]


def _unknown_reason(exits: ExitHistory) -> str:
    """Why no router knows a worker that `octavo up` keeps alive."""
    ended_s = time.time() - exits.last_at
    if exits.count and ended_s < STARTS_S:
        return f"it ended {max(0.0, ended_s):.0f} s ago, and is starting again"
    return "no router knows it now: it starts, hangs, or has ended; see its log"


def _worker(status: admin_pb2.WorkerStatus) -> dict[str, Any]:
    load = status.load
    blocks = {kind: getattr(load, f"num_{kind}_blocks") for kind in ("free", "used", "cached")}
    return {
        **{name: getattr(status, name) for name in ("worker_id", "incarnation", "endpoint")},
        "pid": status.pid or None,
        **{name: getattr(status, name) for name in ("available", "reason", "model", "device")},
        "exits": asdict(ExitHistory()),
        "role": ROLES.get(status.role, ""),
        **{name: getattr(load, name) for name in ("num_sequences", "num_running", "num_waiting")},
        "blocks": {**blocks, "total": status.num_blocks},
        "ranks": [{"rank": each.rank, "host": each.host, "pid": each.pid} for each in status.ranks],
        "standby": {"sequences": load.num_standby_sequences, "kept_blocks": load.num_standby_blocks},
    }


def _standbys(status: dict[str, Any]) -> str:
    """Which workers have standbys, or keep them for others. Empty if none does."""
    rows = [
        [row["worker_id"], row["standby"]["sequences"], row["standby"]["kept_blocks"]]
        for row in status["workers"]
        if any(row["standby"].values())
    ]
    return output.table(["worker", "sequences with a standby", "blocks kept for others"], rows) if rows else ""


def _ranks(status: dict[str, Any]) -> str:
    """The processes of each worker that has several. Empty if none does."""
    rows = [[row["worker_id"], *rank.values()] for row in status["workers"] for rank in row["ranks"]]
    return output.table(["worker", "rank", "host", "pid"], rows) if rows else ""


def _text(status: dict[str, Any]) -> str:
    up, store = status["up"], status["store"]
    parts = [f"octavo up: pid {up['pid']}, {up['model']}, {up['state_dir']}"] if up else []
    routers = [
        [row["router_id"], row["pid"] or "-", row["endpoint"], row["admin_endpoint"], _yes(row["serving"])]
        for row in status["routers"]
    ]
    parts.append(output.table(["router", "pid", "endpoint", "admin", "serving"], routers))
    workers = [
        [
            *(row["worker_id"], row["pid"] or "-", row["endpoint"], row["incarnation"] or "-", row["role"] or "-"),
            row["num_sequences"],
            *(row["blocks"][kind] for kind in ("free", "used", "cached")),
            "yes" if row["available"] else row["reason"] or "no",
        ]
        for row in status["workers"]
    ]
    header = ["worker", "pid", "endpoint", "incarnation", "role", "sequences", "free", "used", "cached", "available"]
    parts.append(output.table(header, workers))
    parts += [_ranks(status), _standbys(status)]
    if store:
        row = [store["url"], store["pid"] or "-", _yes(store["serving"], store["trouble"])]
        parts.append(output.table(["store", "pid", "serving"], [row]))
    return "\n\n".join(filter(None, [*parts, _exits(status)]))


def _exits(status: dict[str, Any]) -> str:
    """What the processes of `octavo up` have ended from, one line for each that has."""
    named = [(row["router_id"], row["exits"]) for row in status["routers"]]
    named += [(row["worker_id"], row["exits"]) for row in status["workers"]]
    named += [("store", status["store"]["exits"])] if status["store"] else []
    return "\n".join(
        f"{name}: has ended {exits['count']} time{'s' * (exits['count'] > 1)}, "
        f"the last time {max(0.0, time.time() - exits['last_at']):.0f} s ago: {exits['last_reason']}"
        for name, exits in named
        if exits["count"]
    )


def _yes(flag: bool, why_not: str = "") -> str:
    return "yes" if flag else ": ".join(filter(None, ["no", why_not]))
