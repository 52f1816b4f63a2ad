"""Several models in one release, how their files come, and the routes and pools by which gateways reach routers."""

import json
import os
import re
import subprocess
import sys

import pytest
from rendered_chart import by_name, of_kind, pods, ports_of, programs, settings_of, template, values_of

from octavo.net.security.roles import ALLOWED, PeerRole

TWO = "models[0].name=small,models[1].name=large,models[1].model.path=/models/large,models[1].worker.gpus=1"


def workers_of(objects):
    found = {name: each for name, each in of_kind(objects, "StatefulSet").items() if "-worker" in name}
    return {name.removeprefix("trial-octavo-worker-"): each for name, each in found.items()}


def test_models_have_workers_of_their_own_and_share_the_rest():
    objects = by_name(template("--set", TWO))
    found = workers_of(objects)
    assert set(found) == {"small", "large"}
    assert list(of_kind(objects, "Deployment")) == ["trial-octavo-router"]
    assert {name for name in of_kind(objects, "StatefulSet") if "-worker" not in name} == {"trial-octavo-store"}
    for name, path, gpus in (("small", "smollm2", None), ("large", "/models/large", 1)):
        (container,) = found[name]["spec"]["template"]["spec"]["containers"]
        read = settings_of("worker", container)
        assert (read.model_name, read.model) == (name, path)
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        selector = found[name]["spec"]["selector"]["matchLabels"]
        assert selector["octavo/model"] == name
        budget = objects["PodDisruptionBudget", f"trial-octavo-worker-{name}"]["spec"]["selector"]
        assert budget == found[name]["spec"]["selector"]
    assert "octavo/model" not in objects["Service", "trial-octavo-workers"]["spec"]["selector"]
    (hook,) = of_kind(objects, "Pod").values()
    assert values_of(hook["spec"]["containers"][0])["MODEL"] == "small"


def test_each_model_is_served_under_a_name_of_its_own():
    """The name of a release of one model is not that of several, and routers refuse the second worker of one name."""
    found = workers_of(by_name(template("--set", f"{TWO},model.name=one,models[1].model.name=org/large")))
    containers = {name: each["spec"]["template"]["spec"]["containers"][0] for name, each in found.items()}
    served = {name: settings_of("worker", container).model_name for name, container in containers.items()}
    assert served == {"small": "small", "large": "org/large"}


def test_routers_see_the_files_of_each_model_once():
    objects = by_name(template(profile="models"))
    router = pods(objects)["router"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in router["containers"][0]["volumeMounts"] if "model" in m["name"]}
    assert mounts == {"/models": "model-small", "/large": "model-large"}
    assert [each["name"] for each in router["initContainers"]] == ["download-small", "download-large"]
    for name, path in (("small", "/models"), ("large", "/large")):
        spec = workers_of(objects)[name]["spec"]["template"]["spec"]
        (fetching,) = spec["initContainers"]
        told = {entry["name"]: entry["value"] for entry in fetching["env"]}
        assert (told["MODEL_FOLDER"], told["MODEL_FOR"]) == (path, "worker")
        read = settings_of("worker", spec["containers"][0])
        assert read.model == path
    same = "models[0].name=a,models[1].name=b,model.volume.persistentVolumeClaim.claimName=models"
    router = pods(by_name(template("--set", same)))["router"]["spec"]
    assert [each["name"] for each in router["volumes"] if "model" in each["name"]] == ["model-a"]


FAKE_HUB = """
import pathlib
def snapshot_download(name, *, local_dir, ignore_patterns):
    kept = [f for f in ("config.json", "model.safetensors") if f"*.{f.rpartition('.')[2]}" not in ignore_patterns]
    for file in kept:
        pathlib.Path(local_dir, file).write_text(name)
    print("fetched", name)
"""


def fetched(container, folder, **env):
    """What an init container that fetches from the hub says, with a hub that is a file."""
    (folder.parent / "huggingface_hub.py").write_text(FAKE_HUB)
    folder.mkdir(exist_ok=True)
    env = {entry["name"]: entry["value"] for entry in container["env"]} | env
    env |= {"MODEL_FOLDER": str(folder), "PYTHONPATH": str(folder.parent), "PATH": os.environ["PATH"]}
    command = [sys.executable, *container["command"][1:]]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", ["router", "worker"])
def test_a_model_of_the_hub_is_fetched_once(tmp_path, program):
    """By the words of the init container, with a hub that is a file. Routers get no weights."""
    objects = by_name(template("--set", "model.download.hub=org/model"))
    found = {component: (pod, container) for component, pod, container in programs(objects)}
    pod, container = found[program]
    (fetching,) = pod["spec"]["initContainers"]
    assert fetching["image"] == container["image"]
    if program == "worker":
        read = settings_of("worker", container)
        assert (read.model, read.model_name) == ("/models", "org/model")
    folder = tmp_path / "files"
    said = [fetched(fetching, folder) for _ in range(2)]
    assert [each.stdout.strip() for each in said] == ["fetched org/model", ""]
    assert (folder / "config.json").read_text() == "org/model"
    assert (folder / "model.safetensors").exists() == (program == "worker")


def test_a_folder_with_another_model_is_not_used(tmp_path):
    """A claim outlives the name in the values: old files must not answer for a new one, nor be mixed with its own."""
    objects = by_name(template("--set", "model.download.hub=org/model"))
    (fetching,) = pods(objects)["worker"]["spec"]["initContainers"]
    folder = tmp_path / "files"
    assert fetched(fetching, folder).returncode == 0
    for program in ("router", "worker"):
        refused = fetched(fetching, folder, MODEL_HUB_NAME="org/next", MODEL_FOR=program)
        assert refused.returncode and "has org/model, and not org/next" in refused.stderr
    assert (folder / "config.json").read_text() == "org/model"


POOL_FIELDS = {"selector", "targetPorts", "endpointPickerRef"}  # of inference.networking.k8s.io/v1, all required


def test_a_pool_has_the_routers_and_the_port_of_openais_api():
    """Fields as the extension's reference of InferencePool v1 says them: no schema of it is here."""
    objects = by_name(template(profile="models"))
    pool = objects["InferencePool", "trial-octavo"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert set(spec) == POOL_FIELDS
    assert set(spec["selector"]) == {"matchLabels"}
    chosen = spec["selector"]["matchLabels"].items()
    assert [c for c, pod, _ in programs(objects) if chosen <= pod["metadata"]["labels"].items()] == ["router"]
    (container,) = [container for component, _, container in programs(objects) if component == "router"]
    assert spec["targetPorts"] == [{"number": ports_of(container)["http"]}]
    expected = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert spec["endpointPickerRef"] == expected
    assert settings_of("router", container).metric_aliases == "vllm"
    route = objects["HTTPRoute", "trial-octavo-http"]["spec"]
    (rule,) = route["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "trial-octavo"}
    ]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_routes_lead_to_ports_that_the_service_has():
    """And from outside nobody reaches what is not for clients."""
    options = "httpRoute.enabled=true,httpRoute.parentRefs[0].name=public"
    objects = by_name(template("--set", options, profile="secure"))
    ports = {port["name"]: port["port"] for port in objects["Service", "trial-octavo"]["spec"]["ports"]}
    (http,) = objects["HTTPRoute", "trial-octavo-http"]["spec"]["rules"]
    assert http["backendRefs"] == [{"name": "trial-octavo", "port": ports["http"]}]
    (grpc,) = objects["GRPCRoute", "trial-octavo"]["spec"]["rules"]
    assert grpc["backendRefs"] == [{"name": "trial-octavo", "port": ports["grpc"]}]
    services = {match["method"]["service"] for match in grpc["matches"]}
    assert "octavo.v1.Inference" in services
    for method in (f"/{service}/" for service in services):
        roles = [allowed for name, allowed in ALLOWED.items() if name.startswith(method)]
        assert roles and all(PeerRole.CLIENT in allowed for allowed in roles), method


def test_on_openshift_no_object_asks_for_an_id():
    asked = re.compile(r"\b(runAsUser|runAsGroup|fsGroup|supplementalGroups|hostPath|hostNetwork|privileged)\b")
    assert asked.search(template())
    assert not asked.search(template(profile="openshift"))


def test_further_objects_may_use_the_values():
    given = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}]
    assert ("ConfigMap", "trial-x") in by_name(template("--set-json", f"extraObjects={json.dumps(given)}"))
