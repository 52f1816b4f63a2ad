"""How many pods there are, where, and how they come and go."""

import re

from rendered_chart import by_name, of_kind, template

from octavo.metrics.table import METRICS, ROUTER, WORKER, MetricKind


def test_routers_scale_by_cpu():
    objects = by_name(template(profile="secure"))
    scaler = objects["HorizontalPodAutoscaler", "trial-octavo-router"]["spec"]
    deployment = objects["Deployment", "trial-octavo-router"]["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "trial-octavo-router"}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 8)
    assert "replicas" not in deployment  # each upgrade would set it back
    assert "cpu" in deployment["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_workers_scale_by_queued_tokens_and_by_what_runs():
    objects = by_name(template("--namespace", "ns", profile="gpu"))
    (scaled,) = of_kind(objects, "ScaledObject").values()
    target = scaled["spec"]["scaleTargetRef"]
    workers = objects[target["kind"], target["name"]]["spec"]
    assert "replicas" not in workers
    asked = {}
    for trigger in scaled["spec"]["triggers"]:
        name, selector = re.fullmatch(r"\w+\((octavo_\w+)(\{.*\})\)", trigger["metadata"]["query"]).groups()
        assert METRICS[name].kind is MetricKind.GAUGE
        asked[name] = re.search(r'namespace="ns",pod=~"(.*)"', selector)[1], METRICS[name].programs
        assert int(trigger["metadata"]["threshold"]) > 0
    assert asked == {
        "octavo_queue_tokens": ("trial-octavo-router-.*", (ROUTER,)),
        "octavo_branches_running": (f"{target['name']}-[0-9]+", (WORKER,)),
    }
    assert re.fullmatch(asked["octavo_branches_running"][0], f"{target['name']}-3")
    # One worker goes at a time, and not before the last one may have drained.
    down = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["policies"][0]["value"] == 1
    assert down["policies"][0]["periodSeconds"] == workers["template"]["spec"]["terminationGracePeriodSeconds"]


def test_numbers_of_pods_that_do_not_scale_are_those_of_the_values():
    objects = by_name(template(profile="gpu"))
    assert objects["StatefulSet", "trial-octavo-worker-prompts"]["spec"]["replicas"] == 2
    assert objects["Deployment", "trial-octavo-router"]["spec"]["replicas"] == 2
    assert not of_kind(objects, "HorizontalPodAutoscaler")


def test_nodes_can_be_drained_one_pod_of_a_kind_at_a_time(objects):
    kinds = {name for kind, name in objects if kind in ("Deployment", "StatefulSet")}
    budgets = of_kind(objects, "PodDisruptionBudget")
    single = {
        name for name in kinds if name.endswith("-store") and objects["StatefulSet", name]["spec"]["replicas"] == 1
    }
    assert set(budgets) == kinds - single  # a budget of the only server would stop the drain of its node
    assert {each["spec"]["maxUnavailable"] for each in budgets.values()} == {1}


def test_pods_are_spread_over_zones_and_nodes(objects):
    for kind, name in objects:
        if kind in ("Deployment", "StatefulSet") and not name.endswith("-store"):
            spread = objects[kind, name]["spec"]["template"]["spec"]["topologySpreadConstraints"]
            keys = [each["topologyKey"] for each in spread]
            assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"], name
