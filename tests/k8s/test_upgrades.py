"""What an upgrade keeps of what the cluster has, and what it refuses before anything changes."""

import json
import re
import shlex

import pytest
from lookup_server import lookup_server
from rendered_chart import CHART, ROOT, by_name, of_kind, run, template, tool


def upgraded(there, *options, helm="helm3", ok=True):
    """The objects, or the error, where the cluster has these objects."""
    for each in there:
        each["metadata"].setdefault("namespace", "ns")
        of_release = {"meta.helm.sh/release-name": "trial", "meta.helm.sh/release-namespace": "ns"}
        each["metadata"]["annotations"] = {**each["metadata"].get("annotations", {}), **of_release}
    with lookup_server(there) as address:
        command = ["template", "trial", CHART, "--namespace", "ns", "--dry-run=server", "--kube-apiserver", address]
        command += ["--disable-openapi-validation"]  # there are no schemas at that server
        said = run(tool(helm), *command, *options, ok=ok)
    return by_name(said) if ok else said


def running(objects, **replicas):
    """The Deployments and StatefulSets of a release, with other numbers of pods."""
    found = {name: each for (kind, name), each in objects.items() if kind in ("Deployment", "StatefulSet")}
    for name, number in replicas.items():
        found[f"trial-octavo-{name}"]["spec"]["replicas"] = number
    return list(found.values())


SCALING = "--set=router.autoscaling.enabled=true,worker.autoscaling.enabled=true,worker.autoscaling.minReplicas=0"


def numbers_of(objects):
    return {
        name.removeprefix("trial-octavo-"): each["spec"]["replicas"]
        for kind in ("Deployment", "StatefulSet")
        for name, each in of_kind(objects, kind).items()
    }


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_turning_autoscaling_on_keeps_the_pods_there_are(helm):
    """Kubernetes takes a missing number for 1, and a number of the values would set back what was scaled."""
    before = running(by_name(template("--set=router.replicas=4,worker.replicas=6")))
    found = upgraded(before, SCALING, "--set=router.replicas=4,worker.replicas=6", helm=helm)
    assert numbers_of(found) == {"router": 4, "worker": 6, "store": 1}


@pytest.mark.parametrize(("routers", "workers"), [(7, 5), (2, 0)])
def test_an_upgrade_keeps_what_autoscaling_has_chosen(routers, workers):
    before = running(by_name(template(SCALING)), router=routers, worker=workers)
    assert numbers_of(upgraded(before, SCALING)) == {"router": routers, "worker": workers, "store": 1}


def test_an_upgrade_starts_what_was_stopped_for_it():
    """A HorizontalPodAutoscaler leaves a Deployment without pods alone."""
    before = running(by_name(template(SCALING)), router=0, worker=0)
    assert numbers_of(upgraded(before, SCALING)) == {"router": 2, "worker": 0, "store": 1}
    always = (SCALING, "--set=worker.autoscaling.minReplicas=3")
    assert numbers_of(upgraded(before, *always))["worker"] == 3


CLAIMS = [
    ("store", "store.bundled.persistence.size=8Gi", "store.bundled.persistence.size=4Gi"),
    ("store", "store.bundled.persistence.enabled=false", "store.bundled.persistence.enabled=true"),
    ("store", "store.bundled.persistence.storageClassName=fast", "store.bundled.persistence.storageClassName="),
    ("worker", "worker.cache.persistent=true", "worker.cache.persistent=false"),
    ("worker", "worker.cache.persistent=true", "worker.cache.persistent=true,worker.cache.size=9Gi"),
]


@pytest.mark.parametrize(("name", "before", "after"), CLAIMS)
def test_a_change_of_claims_is_refused_with_the_remedy(name, before, after):
    """By Helm, before it has changed any object: Kubernetes would refuse one of many."""
    there = running(by_name(template(f"--set={before}")))
    said = upgraded(there, f"--set={after}", ok=False)
    assert f"kubectl --namespace ns delete statefulset trial-octavo-{name} --cascade=orphan" in said
    assert upgraded(there, f"--set={before}")
    assert upgraded([each for each in there if not each["metadata"]["name"].endswith(name)], f"--set={after}")


def test_the_password_of_the_store_is_kept():
    there = list(of_kind(by_name(template()), "Secret").values())
    there[0]["data"]["password"] = "a2VwdA=="
    assert upgraded(there)["Secret", "trial-octavo-store"]["data"]["password"] == "a2VwdA=="


def commands_of_the_guide(heading):
    """The commands of a section of docs/deployment.md, as words."""
    section = (ROOT / "docs/deployment.md").read_text().split(f"\n### {heading}\n")[1].partition("\n## ")[0]
    found = re.findall(r"(?:^|`)((?:kubectl|helm) [^`\n]*)", section.partition("\n### ")[0], flags=re.M)
    return [shlex.split(each, comments=True) for each in found]


def released(**options):
    """The objects of a release called octavo."""
    return by_name(run(tool("helm3"), "template", "octavo", CHART, *(f"--set={k}={v}" for k, v in options.items())))


def test_the_guide_changes_the_volume_that_there_is():
    delete, patch, upgrade, *_ = commands_of_the_guide("Changing volumes")
    objects = released()
    assert delete[:3] == ["kubectl", "delete", "statefulset"] and delete[4:] == ["--cascade=orphan"]
    (claim,) = objects["StatefulSet", delete[3]]["spec"]["volumeClaimTemplates"]
    assert patch[2:4] == ["pvc", f"{claim['metadata']['name']}-{delete[3]}-0"]
    size = json.loads(patch[5])["spec"]["resources"]["requests"]["storage"]
    values = dict(word.split("=") for word in upgrade if "=" in word)
    (changed,) = released(**values)["StatefulSet", delete[3]]["spec"]["volumeClaimTemplates"]
    assert (
        changed["spec"]["resources"]["requests"]["storage"] == size != claim["spec"]["resources"]["requests"]["storage"]
    )


def test_the_guide_deletes_all_that_a_release_leaves():
    """Secrets that cert-manager wrote, and claims, which have the labels by which their StatefulSet finds pods."""
    commands = {tuple(words[:3]): words[3:] for words in commands_of_the_guide("Going back, and taking it away")}
    objects = released(**{"worker.cache.persistent": "true"})
    written = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate").values()}
    assert set(commands["kubectl", "delete", "secret"]) == written
    flag, selector = commands["kubectl", "delete", "pvc"]
    label, _, value = selector.partition("=")
    claiming = [each for each in of_kind(objects, "StatefulSet").values() if "volumeClaimTemplates" in each["spec"]]
    assert (flag, len(claiming)) == ("-l", 2)
    assert {each["spec"]["selector"]["matchLabels"][label] for each in claiming} == {value}
