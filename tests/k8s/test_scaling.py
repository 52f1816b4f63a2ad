"""How many pods there are, where, and how they come and go."""

import re

from rendered_chart import by_name, of_kind, programs, promtool_tests, settings_of, template

from octavo.metrics.table import METRICS, ROUTER, WORKER, MetricKind


def test_workers_scale_by_queued_tokens_and_by_what_runs():
    objects = by_name(template("--namespace", "ns", profile="gpu"))
    (scaled,) = of_kind(objects, "ScaledObject").values()
    target = scaled["spec"]["scaleTargetRef"]
    workers = objects[target["kind"], target["name"]]["spec"]
    assert workers["replicas"] == 2
    asked = {}
    for trigger in scaled["spec"]["triggers"]:
        name, selector = re.search(r"(octavo_\w+)(\{[^}]*\})", trigger["metadata"]["query"]).groups()
        assert METRICS[name].kind is MetricKind.GAUGE
        assert trigger["metadata"]["ignoreNullValues"] == "false"  # a Prometheus that saw nobody is no empty queue
        assert "authenticationRef" not in trigger
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


def test_bounds_are_those_that_kubernetes_takes():
    """An autoscaler with others is refused by the API server, when the rest has been changed."""
    slow = scaled_objects("--set=worker.autoscaling.enabled=true,worker.drainSeconds=3500")
    down = slow["trial-octavo-worker"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["policies"][0]["periodSeconds"] == 1800


def test_nodes_can_be_drained_one_pod_of_a_kind_at_a_time(objects):
    kinds = {name for kind, name in objects if kind in ("Deployment", "StatefulSet", "LeaderWorkerSet")}
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


def scaled_objects(*options, profile="default"):
    return of_kind(by_name(template("--namespace", "ns", *options, profile=profile)), "ScaledObject")


def test_workers_can_be_scaled_to_none_where_requests_wait():
    objects = by_name(template("--namespace", "ns", profile="models"))
    spec = objects["ScaledObject", "trial-octavo-worker-large"]["spec"]
    assert (spec["minReplicaCount"], spec["initialCooldownPeriod"]) == (0, 1800)
    assert objects["StatefulSet", "trial-octavo-worker-large"]["spec"]["replicas"] == 1  # it says what the model is
    (router,) = [container for component, _, container in programs(objects) if component == "router"]
    assert settings_of("router", router).wait_for_workers
    waiting, running, refused = (each["metadata"]["query"] for each in spec["triggers"])
    assert 'model=~"org/large-instruct|"' in waiting
    assert running.endswith('or 0 * max(octavo_queue_tokens{namespace="ns",pod=~"trial-octavo-router-.*"})')
    assert 'reason="NO_WORKERS"' in refused
    for trigger in spec["triggers"]:
        assert trigger["authenticationRef"] == {"name": "prometheus", "kind": "TriggerAuthentication"}
        assert trigger["metadata"]["authModes"] == "bearer"
    others = by_name(template("--set=worker.autoscaling.enabled=true"))
    assert not any(settings_of(*each[::2]).wait_for_workers for each in programs(others) if each[0] == "router")


QUEUED = 'octavo_queue_tokens{namespace="ns",pod="trial-octavo-router-%s",model="%s"}'
RUNNING = 'octavo_branches_running{namespace="ns",pod="trial-octavo-worker-%s"}'
REFUSED = 'octavo_requests_refused_total{namespace="ns",pod="trial-octavo-router-a",reason="NO_WORKERS"}'
LARGE = "org/large-instruct"
# What Prometheus has read, and what the queries for what waits, runs and is refused answer.
CASES = {
    "a request that waits for a first worker": ({QUEUED % ("a", LARGE): "900x10"}, [900, 0, None]),
    "a model that a router does not know": (
        {QUEUED % ("a", ""): "70x10", QUEUED % ("b", LARGE): "70x10"},
        [70, 0, None],
    ),
    "busy workers, and others of another model": (
        {
            QUEUED % ("a", LARGE): "0x10",
            QUEUED % ("a", "small"): "5000x10",
            RUNNING % "large-0": "3x10",
            RUNNING % "large-11": "4x10",
            RUNNING % "small-0": "50x10",
        },
        [0, 7, None],
    ),
    "a refusal": ({QUEUED % ("a", ""): "0x10", REFUSED: "0x2 9x9"}, [0, 0, 1]),
    "nobody is seen": ({'octavo_branches_running{namespace="other",pod="x"}': "1x10"}, [None, None, None]),
}


def test_queries_answer_what_autoscaling_should_know(tmp_path):
    """Where there is no answer, KEDA falls back and starts nobody."""
    spec = scaled_objects(profile="models")["trial-octavo-worker-large"]["spec"]
    queries = [each["metadata"]["query"] for each in spec["triggers"]]
    tests = [
        (series, [(q, [] if v is None else [("{}", v)]) for q, v in zip(queries, expected, strict=True)])
        for series, expected in CASES.values()
    ]
    promtool_tests(tmp_path, tests, "4m")
