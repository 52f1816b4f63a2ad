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


def test_a_kind_of_one_host_stays_a_statefulset(objects):
    assert set(of_kind(objects, "StatefulSet")) == {"trial-octavo-worker-small", "trial-octavo-store"}


def test_hosts_start_together_and_end_together(group):
    assert group["startupPolicy"] == "LeaderCreated"
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["leaderWorkerTemplate"]["size"] == 3
    assert group["networkConfig"] == {"subdomainPolicy": "Shared"}


def test_hosts_find_each_other_by_torchruns_variables(leader, follower):
    """The controller puts its variables before all others of a container, so that these may name them."""
    given = {
        "POD_IP": "10.0.0.1",
        "LWS_LEADER_ADDRESS": "large-0.large.ns",
        "LWS_GROUP_SIZE": "3",
        "LWS_WORKER_INDEX": "2",
    }
    for pod in (leader, follower):
        found = {name: value for name, value in variables(pod).items() if value}
        for name, value in given.items():
            found = {key: each.replace(f"$({name})", value) for key, each in found.items()}
        settings = from_args(WorkerSettings, argparse.Namespace(), environ=found)
        assert (settings.launcher, settings.tensor_parallel) == ("torchrun", 6)
        assert HostPlace.of(settings) == HostPlace(2, 3, Endpoint("large-0.large.ns", 29500))


def test_the_front_alone_is_called_and_drained(leader, follower):
    called = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert called <= set(container(leader))
    assert not called & set(container(follower))
    # A follower stays until its front has drained, whichever of the two is asked to go.
    assert follower["spec"]["terminationGracePeriodSeconds"] == leader["spec"]["terminationGracePeriodSeconds"]


def test_hosts_have_the_same_model_and_certificate(leader, follower):
    for part in ("image", "args", "volumeMounts", "resources", "securityContext"):
        assert container(leader)[part] == container(follower)[part]
    assert leader["spec"]["volumes"] == follower["spec"]["volumes"]


def test_hosts_of_a_group_may_call_each_other(objects, follower):
    """On whatever ports they choose, as workers that move sequences do."""
    policy = of_kind(objects, "NetworkPolicy")["trial-octavo-worker"]["spec"]
    labels = follower["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    peer = [{"podSelector": policy["podSelector"]}]
    assert {"from": peer} in policy["ingress"]
    assert {"to": peer} in policy["egress"]


def test_groups_scale_as_a_whole(objects):
    (scaled,) = of_kind(objects, "ScaledObject").values()
    target = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "trial-octavo-worker-large",
    }
    assert scaled["spec"]["scaleTargetRef"] == target


def test_hosts_may_have_a_stage_each():
    worker = {"group": {"size": 3}, "settings": {"pipeline_parallel": 3}}
    rendered = by_name(template("--set-json", f"worker={json.dumps(worker)}"))
    (found,) = of_kind(rendered, "LeaderWorkerSet").values()
    given = variables(found["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
    assert given["OCTAVO_WORKER_PIPELINE_PARALLEL"] == "3"
    assert "OCTAVO_WORKER_TENSOR_PARALLEL" not in given


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"settings": {"tensor_parallel": 4}}, "has to be a multiple of worker.group.size: each host has equally many"),
        ({"settings": {"pipeline_parallel": 4}}, "has to be a multiple of worker.group.size: each host has equally"),
        ({"settings": {"tensor_parallel": 3, "pipeline_parallel": 2}}, "the one has to be a multiple of the other"),
        ({"cache": {"persistent": True}}, "do not go together"),
    ],
)
def test_what_groups_cannot_have_is_refused(value, says):
    worker = {"group": {"size": 3}, **value}
    assert says in template("--set-json", f"worker={json.dumps(worker)}", ok=False)
