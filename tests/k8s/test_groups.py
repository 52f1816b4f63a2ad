"""Workers of several hosts: a LeaderWorkerSet whose pods find each other, start together, and end as one worker."""

import argparse
import json

import pytest
from rendered_chart import by_name, of_kind, template

from gpu_worker.group.hosts.host_streams import HostPlace
from octavo.settings.loading import from_args
from octavo.settings.worker import WorkerSettings
from octavo.wire.endpoint import Endpoint


@pytest.fixture(scope="module")
def objects():
    return by_name(template(profile="groups"))


@pytest.fixture(scope="module")
def group(objects):
    (found,) = of_kind(objects, "LeaderWorkerSet").values()
    return found["spec"]


@pytest.fixture(scope="module")
def leader(group):
    return group["leaderWorkerTemplate"]["leaderTemplate"]


@pytest.fixture(scope="module")
def follower(group):
    return group["leaderWorkerTemplate"]["workerTemplate"]


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def variables(pod):
    return {each["name"]: each.get("value") for each in container(pod)["env"]}


def test_hosts_start_end_and_scale_together(objects, group):
    """A kind of one host stays a StatefulSet."""
    assert set(of_kind(objects, "StatefulSet")) == {"trial-octavo-worker-small", "trial-octavo-store"}
    assert (group["startupPolicy"], group["networkConfig"]) == ("LeaderCreated", {"subdomainPolicy": "Shared"})
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["leaderWorkerTemplate"]["size"] == 3
    (scaled,) = of_kind(objects, "ScaledObject").values()
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
    assert scaled["spec"]["scaleTargetRef"] == target | {"name": "trial-octavo-worker-large"}


def test_hosts_find_each_other_by_torchruns_variables(leader, follower):
    """The controller puts its variables before all others of a container, so that these may name them."""
    given = {"POD_IP": "10.0.0.1", "LWS_LEADER_ADDRESS": "large-0.large.ns"}
    given |= {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2"}
    for pod in (leader, follower):
        found = {name: value for name, value in variables(pod).items() if value}
        for name, value in given.items():
            found = {key: each.replace(f"$({name})", value) for key, each in found.items()}
        settings = from_args(WorkerSettings, argparse.Namespace(), environ=found)
        assert (settings.launcher, settings.tensor_parallel) == ("torchrun", 6)
        assert HostPlace.of(settings) == HostPlace(2, 3, Endpoint("large-0.large.ns", 29500))


def test_the_front_alone_is_called_and_drained(leader, follower):
    """Beside that its hosts are alike, with the same model and certificate."""
    called = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert called <= set(container(leader))
    assert not called & set(container(follower))
    # A follower stays until its front has drained, whichever of the two is asked to go.
    for part in ("terminationGracePeriodSeconds", "volumes"):
        assert leader["spec"][part] == follower["spec"][part]
    for part in ("image", "args", "volumeMounts", "resources", "securityContext"):
        assert container(leader)[part] == container(follower)[part]


def test_hosts_of_a_group_may_call_each_other(objects, follower):
    """On whatever ports they choose, as workers that move sequences do."""
    policy = of_kind(objects, "NetworkPolicy")["trial-octavo-worker"]["spec"]
    labels = follower["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    peer = [{"podSelector": policy["podSelector"]}]
    assert {"from": peer} in policy["ingress"]
    assert {"to": peer} in policy["egress"]


def test_hosts_may_have_a_stage_each():
    worker = {"group": {"size": 3}, "settings": {"pipeline_parallel": 3}}
    rendered = by_name(template("--set-json", f"worker={json.dumps(worker)}"))
    (found,) = of_kind(rendered, "LeaderWorkerSet").values()
    given = variables(found["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
    assert given["OCTAVO_WORKER_PIPELINE_PARALLEL"] == "3"
    assert "OCTAVO_WORKER_TENSOR_PARALLEL" not in given
