"""The chart renders on both Helms, is valid for Kubernetes, and says what the code says."""

import json
import re
import shutil
from itertools import pairwise
from textwrap import indent

import pytest
import yaml
from rendered_chart import CHART, PROFILES, by_name, pods, run, template, tool

from octavo import health, settings
from octavo.endpoint import parse_cells
from octavo.options import options_of

CLASSES = {"router": settings.RouterSettings, "worker": settings.WorkerSettings}
SERVED = {"router": "resume", "worker": "octavo.internal.v1.Worker"}
# Settings that the chart decides itself, by flag or variable.
DECIDED = {
    "router": {"listen", "host", "admin_listen", "router_id", "store", "log_format", "drain_ms"},
    "worker": {
        *("listen", "host", "advertise", "worker_id", "store"),
        *("model", "model_name", "device", "log_format", "drain_ms"),
    },
}


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_both_helms_lint_it_and_render_the_same(helm):
    values = [word for path in sorted((CHART / "ci").iterdir()) for word in ("-f", path)]
    assert "0 chart(s) failed" in run(tool(helm), "lint", "--strict", CHART, *values)
    for profile in PROFILES:
        assert by_name(template(helm=helm, profile=profile)) == by_name(template(profile=profile))


@pytest.mark.parametrize("version", ["1.27", "1.31", "1.37"])
def test_kubernetes_accepts_it(profile, version, tmp_path):
    path = tmp_path / "objects.yaml"
    path.write_text(template("--kube-version", f"{version}.0", profile=profile))
    run(tool("kubernetes-validate"), "--strict", "-k", version, path)


def test_services_find_pods_and_their_ports(objects):
    templates = pods(objects).values()
    for (kind, name), service in objects.items():
        if kind != "Service":
            continue
        selector = service["spec"]["selector"]
        (pod,) = [each for each in templates if selector.items() <= each["metadata"]["labels"].items()]
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports, name
    for (kind, _), each in objects.items():
        if kind in ("Deployment", "StatefulSet"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if kind == "StatefulSet":
            assert objects["Service", each["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"


def test_ports_and_probes_are_those_of_the_code(objects):
    for component, cls in CLASSES.items():
        (container,) = pods(objects)[component]["spec"]["containers"]
        port = int(cls().listen.rpartition(":")[2])
        assert container["ports"] == [{"name": "grpc", "containerPort": port}]
        assert container["readinessProbe"]["grpc"] == {"port": port, "service": SERVED[component]}
        assert container["livenessProbe"]["grpc"] == {"port": port, "service": health.ALIVE}
    worker = pods(objects)["worker"]["spec"]["containers"][0]
    assert worker["startupProbe"]["failureThreshold"] * worker["startupProbe"]["periodSeconds"] >= 1800


def test_flags_and_variables_are_those_of_the_code(objects):
    """What a pod gives its program is read by the program's own settings, and is what the profile says."""
    for component, cls in CLASSES.items():
        (container,) = pods(objects)[component]["spec"]["containers"]
        options = {option.variable: option for option in options_of(cls).values()}
        flags = {option.flag for option in options.values()}
        words = container["args"]
        assert set(words[::2]) <= flags, words
        for entry in container["env"]:
            if entry["name"] == "POD_IP":
                continue
            option = options[entry["name"]]
            if "value" in entry and "$(" not in entry["value"]:
                option.check_value(option.from_text(entry["value"]))
        names = [entry["name"] for entry in container["env"]]
        assert len(set(names)) == len(names)
        assert {f"OCTAVO_{component.upper()}_ID", f"OCTAVO_{component.upper()}_STORE"} <= set(names)


def test_a_pod_has_left_before_it_is_killed(objects):
    """What a program may take to leave, what it waits before, and five seconds to end in."""
    for component in CLASSES:
        spec = pods(objects)[component]["spec"]
        (container,) = spec["containers"]
        name = f"OCTAVO_{component.upper()}_DRAIN_MS"
        (drain_ms,) = [int(entry["value"]) for entry in container["env"] if entry["name"] == name]
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert before[0] == "sleep"
        assert 0 < drain_ms == 1000 * (spec["terminationGracePeriodSeconds"] - int(before[1]) - 5)


def test_the_schema_knows_every_setting_that_the_chart_leaves_open():
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for component, cls in CLASSES.items():
        names = [name for name, option in options_of(cls).items() if not option.hidden]
        assert set(names) >= DECIDED[component]
        named = schema[component]["properties"]["settings"]["propertyNames"]["enum"]
        assert sorted(named) == sorted(set(names) - DECIDED[component])


def test_every_value_has_a_comment_and_a_place_in_the_schema():
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values, known, path):
        for name, value in values.items():
            assert name in known["properties"], f"{path}{name}"
            if isinstance(value, dict) and "properties" in known["properties"][name]:
                compare(value, known["properties"][name], f"{path}{name}.")

    compare(yaml.safe_load(text), schema, "")
    lines = text.splitlines()
    for before, line in pairwise(lines):
        name, colon, value = line.strip().partition(":")
        if colon and value and not name.startswith("#") and name not in ("requests", "limits", "existingSecretKey"):
            assert before.strip().startswith("#"), line


def test_pods_are_restricted(objects):
    """The restricted profile of the Pod Security Standards, and limits for every container."""
    for component, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, component
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][kind].keys()


def test_the_store_is_bundled_unless_there_is_another():
    bundled = by_name(template())
    assert ("StatefulSet", "trial-octavo-store") in bundled
    assert bundled["Secret", "trial-octavo-store"]["stringData"]["url"] == "redis://trial-octavo-store:6379/0"
    given = by_name(template("--set", "store.url=rediss://user:pw@store:6380/1"))
    assert given["Secret", "trial-octavo-store"]["stringData"]["url"] == "rediss://user:pw@store:6380/1"
    secret = by_name(template(profile="external-store"))
    assert not [name for kind, name in secret if kind == "Secret"]
    for objects in (given, secret):
        assert not [name for kind, name in objects if kind == "StatefulSet" and name.endswith("store")]
    env = pods(secret)["worker"]["spec"]["containers"][0]["env"]
    (url,) = [entry["valueFrom"]["secretKeyRef"] for entry in env if entry["name"] == "OCTAVO_WORKER_STORE"]
    assert url == {"name": "octavo-store", "key": "url"}


CELLS = "cells[0].name=a,cells[0].store.existingSecret=mine,cells[1].name=b,cells[1].worker.replicas=3"


def test_each_cell_has_objects_and_a_store_of_its_own(tmp_path):
    text = template("--set", CELLS)
    objects = by_name(text)
    assert len([each for each in yaml.safe_load_all(text) if each]) == len(objects), "two objects with one name"
    templates = {
        key: each["spec"]["template"] for key, each in objects.items() if key[0] in ("Deployment", "StatefulSet")
    }
    services = {key: each["spec"]["selector"] for key, each in objects.items() if key[0] == "Service"}
    for (_, name), selector in services.items():
        found = [key[1] for key, pod in templates.items() if selector.items() <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, f"{name} finds {found}"
        assert found[0].startswith(f"trial-octavo-{selector['octavo/cell']}-")
    for cell, secret in (("a", "mine"), ("b", "trial-octavo-b-store")):
        for key in (("Deployment", f"trial-octavo-{cell}-router"), ("StatefulSet", f"trial-octavo-{cell}-worker")):
            (container,) = templates[key]["spec"]["containers"]
            (url,) = [each for each in container["env"] if each["name"].endswith("_STORE")]
            assert url["valueFrom"]["secretKeyRef"]["name"] == secret
    assert ("StatefulSet", "trial-octavo-a-store") not in objects
    assert objects["Secret", "trial-octavo-b-store"]["stringData"]["url"] == "redis://trial-octavo-b-store:6379/0"
    workers = [objects["StatefulSet", f"trial-octavo-{cell}-worker"]["spec"]["replicas"] for cell in "ab"]
    assert workers == [1, 3]
    path = tmp_path / "objects.yaml"
    path.write_text(text)
    run(tool("kubernetes-validate"), "--strict", "-k", "1.31", path)


def test_what_the_notes_say_of_cells_is_what_clients_take(tmp_path):
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/notes.yaml").write_text("kind: Notes\nmetadata: {name: n}\ntext: |\n" + indent(notes, "  "))
    text = run(tool("helm3"), "template", "trial", chart, "--namespace", "ns", "--set", CELLS)
    said = by_name(text)["Notes", "n"]["text"]
    (endpoints,) = re.findall(r"--endpoint '(.*)'", said)
    assert parse_cells(endpoints) == (("trial-octavo-a.ns:50051",), ("trial-octavo-b.ns:50051",))


def test_a_gpu_is_asked_for_by_its_name():
    container = pods(by_name(template(profile="gpu")))["worker"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["args"][-2:] == ["--device", "cuda"]
    default = pods(by_name(template()))["worker"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in default["resources"]["limits"]


def test_addresses_of_version_6_have_brackets():
    worker = pods(by_name(template("--set", "ipFamily=IPv6")))["worker"]["spec"]["containers"][0]
    assert worker["args"][:2] == ["--host", "::"]
    assert {"name": "OCTAVO_WORKER_ADVERTISE", "value": "[$(POD_IP)]"} in worker["env"]


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("router.replicas=0", "router"),
        ("router.settings.max_stream=5", "max_stream"),
        ("worker.settings.store=redis://x", "store"),
        ("worker.device=tpu", "device"),
        ("store.url=http://x", "url"),
        ("modle.path=x", "modle"),
        ("cells[0].name=Cell_A", "cells.0.name"),
        ("cells[0].nmae=a", "nmae"),
        ("cells[0].name=a,store.url=redis://one", "a cell has a store of its own"),
    ],
)
def test_wrong_values_are_refused_by_name(option, what):
    assert what in template("--set", option, ok=False)
