"""The chart renders on both Helms, is valid for Kubernetes, is hardened, and says what the code says."""

import base64
import json
import re

import pytest
import yaml
from rendered_chart import (
    CHART,
    CLASSES,
    INSECURE,
    PROFILES,
    all_pods,
    by_name,
    component_of,
    found_by,
    of_kind,
    options_by_variable,
    pods,
    ports_of,
    programs,
    run,
    secrets_of,
    settings_of,
    template,
    tool,
    values_of,
)

from octavo.settings.loading import TORCHRUN

# What others define: no schema of Kubernetes knows it.
CUSTOM = {"Certificate", "Issuer", "GRPCRoute", "HTTPRoute", "InferencePool", "BackendTLSPolicy", "LeaderWorkerSet"}
CUSTOM |= {"PodMonitor", "PrometheusRule", "ScaledObject", "ServiceMonitor"}


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_both_helms_lint_every_profile(helm):
    for profile in PROFILES:
        values = [] if profile == "default" else ["-f", CHART / f"ci/{profile}-values.yaml"]
        assert "0 chart(s) failed" in run(tool(helm), "lint", "--strict", CHART, *values)


def test_both_helms_render_the_same(profile):
    assert by_name(template(helm="helm4", profile=profile)) == by_name(template(profile=profile))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_kubernetes_accepts_it(version, tmp_path):
    """The oldest and the newest version whose schemas there are."""
    paths = [tmp_path / f"{profile}.yaml" for profile in PROFILES]
    for profile, path in zip(PROFILES, paths, strict=True):
        path.write_text(template("--kube-version", f"{version}.0", profile=profile))
    said = run(tool("kubernetes-validate"), "--strict", "-k", version, *paths)
    assert set(re.findall(r"Couldn't find schema for kind (\w+)", said)) <= CUSTOM
    assert not [line for line in said.splitlines() if not line.startswith(("INFO", "WARN"))]


def findings(folder):
    options = ["--skip-check-update", "--misconfig-scanners", "kubernetes", "--quiet", "--format", "json"]
    said = json.loads(run(tool("trivy"), "config", *options, "--cache-dir", folder / "cache", folder / "objects"))
    return {each["ID"] for result in said.get("Results", ()) for each in result.get("Misconfigurations", ())}


@pytest.mark.timeout(300)
def test_trivy_has_no_complaint_and_sees_a_fault(tmp_path):
    """Of whatever severity. One run, since loading its checks takes most of the time; the last object has a fault."""
    (tmp_path / "objects").mkdir()
    rendered = {
        json.dumps(each, sort_keys=True)
        for profile in PROFILES
        if profile != "openshift"  # there the platform chooses a user above 10000, which trivy cannot know
        for (kind, _), each in by_name(template(profile=profile)).items()
        if kind in ("Deployment", "StatefulSet", "Pod")
    }
    (tmp_path / "objects/all.yaml").write_text("\n---\n".join(sorted(rendered)))
    faulty = by_name(template())["Deployment", "trial-octavo-router"]
    faulty["spec"]["template"]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    (tmp_path / "objects/faulty.yaml").write_text(yaml.safe_dump(faulty))
    assert findings(tmp_path) == {"KSV001"}


def test_selectors_find_the_pods_that_they_should(objects):
    """Those of Services one component and its ports; those of other objects their own pods alone."""
    templates = all_pods(objects)
    for (kind, name), each in objects.items():
        if kind not in ("Service", "Deployment", "StatefulSet", "PodDisruptionBudget"):
            continue
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        found = found_by(selector, templates)
        if kind == "Service":
            assert len({component_of(pod) for pod in found.values()}) == 1, name
            ports = [ports_of(container).keys() for pod in found.values() for container in pod["spec"]["containers"]]
            assert all({port["targetPort"] for port in each["spec"]["ports"]} <= names for names in ports), name
            continue
        assert [found_name for _, found_name in found] == [name], (kind, name)
        if kind == "StatefulSet":
            assert objects["Service", each["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
        for spread in each["spec"].get("template", {}).get("spec", {}).get("topologySpreadConstraints", ()):
            assert spread["labelSelector"]["matchLabels"] == selector


BESIDE = {"POD_IP", "HOME", "STORE_PASSWORD", "HF_HUB_OFFLINE"} | {"MASTER_ADDR", "MASTER_PORT", *TORCHRUN}


def test_what_a_pod_is_told_is_what_its_program_reads(objects):
    """Every argument and variable is one of the program's own, has a value that it takes, and is there once."""
    for component, pod, container in programs(objects):
        names, known = [entry["name"] for entry in container["env"]], options_by_variable(component)
        assert len(set(names)) == len(names)
        assert set(names) - known.keys() <= BESIDE
        read = settings_of(component, container)
        assert read.store == values_of(container).get(f"OCTAVO_{component.upper()}_STORE", "redis://store:6379/0")
        assert read.log_format == "json"
        assert read.address.startswith("0.0.0.0:") and read.web_listen.startswith("0.0.0.0:")
        assert component == "router" or read.advertise == "10.0.0.7"
        assert {f"{component}_id", "store"} <= {known[name].name for name in names if name in known}
        usual = CLASSES[component]()
        listens = {"grpc": usual.listen, "web": usual.web_listen}
        listens |= {"http": usual.http_listen} if component == "router" else {}
        assert ports_of(container) == {name: int(each.rpartition(":")[2]) for name, each in listens.items()}
        startup = container["startupProbe"]  # a router waits for its store, and a worker loads its model
        assert startup["failureThreshold"] * startup["periodSeconds"] >= {"router": 900, "worker": 1800}[component]
        # Kubernetes waits for what comes before a drain, for the drain, and for some seconds to end in.
        grace, drain_s = pod["spec"]["terminationGracePeriodSeconds"], read.drain_ms // 1000
        command = container["lifecycle"]["preStop"]["exec"]["command"]
        if component == "router":
            assert command[0] == "sleep"
            assert grace == int(command[1]) + drain_s + 12
        else:
            assert command == ["octavo", "drain", "--self", "--grace", str(grace - 15)]
            assert grace == drain_s + 15


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def test_pods_are_restricted(objects):
    """The restricted profile of the Pod Security Standards, a read-only root, and limits for every container; and no
    secret stands in its arguments or variables."""
    for key, pod in all_pods(objects).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        claims = {each["metadata"]["name"] for each in objects[key]["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in spec.get("volumes", ())} | claims
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == RESTRICTED, key
            assert all({"cpu", "memory"} <= container["resources"][kind].keys() for kind in ("requests", "limits"))
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        mounted = [mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]]
        assert sorted(mounted) == sorted(volumes), key
        secrets = [volume["secret"] for volume in spec.get("volumes", ()) if "secret" in volume]
        assert all(each["defaultMode"] == 0o440 for each in secrets)  # for the group of the pod, and nobody else
        for container in spec["containers"]:
            words = [word for part in ("command", "args") for word in container.get(part, [])]
            words += values_of({"env": [], **container}).values()
            urls = [word for word in words if "redis://" in word or "rediss://" in word]
            assert all("://:$(STORE_PASSWORD)@" in url for url in urls), key
            names = [entry["name"] for entry in container.get("env", ())]
            assert not urls or names.index("STORE_PASSWORD") < len(names) - 1  # variables see those before them


def test_the_store_is_bundled_unless_there_is_another():
    bundled = by_name(template(*INSECURE))
    assert ("StatefulSet", "trial-octavo-store") in bundled
    assert bundled["Secret", "trial-octavo-store"]["data"].keys() == {"password"}
    for component in ("router", "worker"):
        said = values_of(pods(bundled)[component]["spec"]["containers"][0])[f"OCTAVO_{component.upper()}_STORE"]
        assert said == "redis://:$(STORE_PASSWORD)@trial-octavo-store:6379/0"
    given = by_name(template("--set", "store.url=rediss://user:pw@store:6380/1"))
    assert given["Secret", "trial-octavo-store"]["stringData"]["url"] == "rediss://user:pw@store:6380/1"
    secret = by_name(template(profile="external-store"))
    assert not [name for kind, name in secret if kind == "Secret"]
    for objects in (given, secret):
        assert not [name for kind, name in objects if kind == "StatefulSet" and name.endswith("store")]
    container = pods(secret)["worker"]["spec"]["containers"][0]
    assert secrets_of(container)["OCTAVO_WORKER_STORE"] == ("octavo-store", "url")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["store-tls"] == "/etc/octavo/store-tls"


def test_the_password_of_the_store_is_made_anew_or_named():
    """Helm makes one; upgrades find it in the cluster, which only a cluster can show."""
    first, second = (run(tool("helm3"), "template", "trial", CHART, "--set", f"clusterDomain=x{i}") for i in (1, 2))
    passwords = [by_name(text)["Secret", "trial-octavo-store"]["data"]["password"] for text in (first, second)]
    assert passwords[0] != passwords[1]
    assert all(re.fullmatch(rb"[A-Za-z0-9]{40}", base64.b64decode(each)) for each in passwords)
    named = by_name(template("--set", "store.bundled.passwordSecret=mine"))
    assert not of_kind(named, "Secret")
    containers = [container for pod in all_pods(named).values() for container in pod["spec"]["containers"]]
    asked = [ref for each in containers for ref in secrets_of(each).values()]
    assert asked == [("mine", "password")] * 5


CELLS = "cells[0].name=a,cells[0].store.existingSecret=mine,cells[1].name=b,cells[1].worker.replicas=3"


def test_each_cell_has_objects_and_a_store_of_its_own():
    objects = by_name(template(*INSECURE, "--set", CELLS))
    templates = all_pods(objects)
    for name, service in of_kind(objects, "Service").items():
        [(_, found)] = found_by(service["spec"]["selector"], templates)
        assert found.startswith(f"trial-octavo-{service['spec']['selector']['octavo/cell']}-"), name
    assert ("StatefulSet", "trial-octavo-a-store") not in objects
    for component, pod, container in programs(objects):
        url, refs = f"OCTAVO_{component.upper()}_STORE", secrets_of(container)
        if pod["metadata"]["labels"]["octavo/cell"] == "a":
            assert refs[url][0] == "mine"
        else:
            assert refs["STORE_PASSWORD"][0] == "trial-octavo-b-store"
            assert values_of(container)[url] == "redis://:$(STORE_PASSWORD)@trial-octavo-b-store:6379/0"
    assert ("Secret", "trial-octavo-b-store") in objects
    workers = [objects["StatefulSet", f"trial-octavo-{cell}-worker"]["spec"]["replicas"] for cell in "ab"]
    assert workers == [1, 3]


def test_a_container_has_the_variables_that_values_name():
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    given = json.dumps({"env": [token]})
    objects = by_name(template(f"--set-json=router={given}", f"--set-json=worker={given}"))
    for _, _, container in programs(objects):
        assert container["env"].count(token) == 1


def test_addresses_of_version_6_have_brackets():
    objects = by_name(template("--set", "ipFamily=IPv6"))
    for component, _, container in programs(objects):
        read = settings_of(component, container, pod_ip="fd00::7")
        assert read.address.startswith("[::]:") and read.web_listen.startswith("[::]:")
        assert component == "router" or read.advertise == "[fd00::7]"
