"""Clients that know nothing of octavo: grpcurl and buf, by reflection alone."""

import json
import subprocess

from live.grpcurl import grpcurl, objects, tool

from octavo.client import SamplingParams
from octavo.wire.public import sampling_to_wire

SEQ = f"{77:032x}"


def test_list_and_describe(cluster):
    reflection = {"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"}
    standard = {"grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} | reflection
    listeners = [
        (cluster.endpoints[0], {"octavo.v1.Inference"}),
        (cluster.admin_endpoints[0], {"octavo.v1.Admin"}),
        (cluster.worker_endpoints["w0"], {"octavo.internal.v1.Worker", "octavo.internal.v1.Transfer"}),
    ]
    for endpoint, own in listeners:
        assert set(grpcurl(endpoint, "list").split()) == standard | own
        for service in own:
            assert f"service {service.rpartition('.')[2]} {{" in grpcurl(endpoint, "describe", service)
            health = objects(grpcurl(endpoint, "grpc.health.v1.Health/Check", data={"service": service}))
            assert health == [{"status": "SERVING"}]
    assert "max_tokens" in grpcurl(cluster.endpoints[0], "describe", "octavo.v1.SamplingParams")


def test_one_step_of_a_worker(solo):
    """A finite grant, as worker.proto describes it: one step, printed; with nothing to do, and after a Schedule."""
    endpoint = solo.worker_endpoints["w0"]

    def step():
        before = solo.load("w0").num_steps
        printed = objects(grpcurl(endpoint, "octavo.internal.v1.Worker/Step", data={"grant": {"steps": 1}}))
        assert solo.load("w0").num_steps == before + 1
        assert len(printed) == 1
        return printed[0]

    assert "items" not in step()
    sampling = sampling_to_wire(SamplingParams(temperature=0, max_tokens=5, seed=1, best_of=1))
    admission = {"seq_id": SEQ, "epoch": 1, "prompt": {"ids": [5] * 40}, "priority": 3}
    admission["sampling"] = {"temperature": 0, "max_tokens": sampling.max_tokens, "seed": 1}
    answer = objects(grpcurl(endpoint, "octavo.internal.v1.Worker/Schedule", data={"admissions": [admission]}))[0]
    assert answer["results"][0]["outcome"] == "ADMISSION_OUTCOME_ADMITTED", answer
    assert step()["num_tokens"] == 40
    for operation in ("OUT", "IN", "DROP"):
        item = {"seq_id": SEQ, "epoch": 1, "operation": f"SWAP_OPERATION_{operation}"}
        assert objects(grpcurl(endpoint, "octavo.internal.v1.Worker/Swap", data={"items": [item]}))[0]["results"]
    grpcurl(endpoint, "octavo.internal.v1.Worker/Cancel", data={"sequences": [{"seq_id": SEQ, "epoch": 1}]})
    step()
    hello = objects(grpcurl(endpoint, "octavo.internal.v1.Worker/Hello", data={}))[0]
    assert hello["worker_id"] == "w0"


def test_buf_curl(cluster, oracle):
    """A second client, of another family, by the stable reflection: grpcurl of today knows v1alpha only."""
    data = {"token_ids": {"ids": [1, 2, 3]}, "sampling": {"max_tokens": 6, "temperature": 0}}
    url = f"http://{cluster.endpoints[0]}/octavo.v1.Inference/Generate"
    protocol = ["--protocol=grpc", "--http2-prior-knowledge", "--reflect-protocol=grpc-v1"]
    command = [tool("buf"), "curl", *protocol, "-d", json.dumps(data), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    tokens = [token for event in objects(done.stdout) for token in event.get("token_ids", [])]
    assert tokens == oracle.tokens([1, 2, 3], 6)
