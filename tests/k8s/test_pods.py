"""The programs of the chart's pods, started here with the arguments and variables that the chart gives them."""

import json
import shutil
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live.cluster import StoreProcess
from live.process import Process, wait_until
from rendered_chart import by_name, pods, template

from octavo.cli import ports
from octavo.client import Client

SECONDS = 90


@pytest.fixture
def store(tmp_path):
    made = StoreProcess(tmp_path)
    made.start()
    yield made
    made.stop()


def pod_process(objects, component, port, store, directory):
    """The container's command, with this machine's addresses, and a port that nothing else has here."""
    container = pods(objects)[component]["spec"]["containers"][0]
    known = {"metadata.name": f"trial-{component}-0", "status.podIP": "127.0.0.1"}
    env = {"HOME": str(directory)}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        field = source.get("fieldRef", {}).get("fieldPath")
        value = known[field] if field else store.url if source else entry["value"]
        env[entry["name"]] = value.replace("$(POD_IP)", env.get("POD_IP", ""))
    env[f"OCTAVO_{component.upper()}_LISTEN"] = f"127.0.0.1:{port}"
    if component == "router":
        env["OCTAVO_ROUTER_ADMIN_LISTEN"] = "127.0.0.1:0"
    octavo = str(Path(sys.executable).with_name("octavo"))
    words = [*(f"{name}={value}" for name, value in env.items()), octavo, component, *container["args"]]
    command = [str(shutil.which("env")), "-i", *words]
    return Process(component, command, directory / f"{component}.log", directory), container


def probe(container, which, port):
    """What kubelet sees: whether the probe of the container succeeds."""
    service = container[which]["grpc"]["service"]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_pods_of_the_default_profile_serve(tmp_path, store):
    objects = by_name(template())
    router_port, worker_port = ports.pick(2)
    router, router_container = pod_process(objects, "router", router_port, store, tmp_path)
    worker, worker_container = pod_process(objects, "worker", worker_port, store, tmp_path)
    try:
        router.start()
        wait_until(lambda: probe(router_container, "livenessProbe", router_port), SECONDS, router.tail())
        assert not probe(router_container, "readinessProbe", router_port)  # no worker yet
        worker.start()
        wait_until(lambda: probe(worker_container, "startupProbe", worker_port), SECONDS, "the worker does not start")
        wait_until(lambda: probe(router_container, "readinessProbe", router_port), SECONDS, "no worker is met")
        with Client(f"127.0.0.1:{router_port}") as client:
            assert client.complete("Once upon a time", max_tokens=4, temperature=0).token_ids
        lines = [json.loads(line) for line in worker.log.read_text().splitlines()]
        assert any("trial-worker-0" in json.dumps(line) for line in lines)
        assert (worker.stop(), router.stop()) == (0, 0)
    finally:
        worker.stop(0)
        router.stop(0)
