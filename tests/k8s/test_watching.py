"""Dashboard and alerts name only metrics that exist, with labels that they have; each alert fires and is explained."""

import json
import re

import pytest
import yaml
from rendered_chart import CHART, CLASSES, ROOT, by_name, of_kind, programs, promtool, settings_of, template

from octavo.cli.commands import parser
from octavo.metrics.table import METRICS, MetricKind
from octavo.net.security.roles import PeerRole
from octavo.settings.options import options_of

WATCHING = CHART / "watching"
ON = [f"--set=watching.{part}.enabled=true" for part in ("monitor", "alerts", "dashboard")]
TARGET_LABELS = {"namespace", "release", "cell", "pod", "le"}  # what Prometheus adds to each series
SERIES = {series: metric for metric in METRICS.values() for series in metric.series}
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
NAME = re.compile(r"\boctavo_[a-z_]*[a-z]\b")


def rules():
    (group,) = yaml.safe_load((WATCHING / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def dashboard():
    return json.loads((WATCHING / "dashboard.json").read_text())


def expressions():
    found = [(name, rule["expr"]) for name, rule in rules().items()]
    for panel in dashboard()["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def faults(expr):
    """What an expression asks of metrics that they do not have."""
    bare = QUOTED.sub('""', expr)
    found = [f"no metric {name}" for name in NAME.findall(bare) if name not in SERIES]
    for name, labels in re.findall(r"(octavo_\w+)\{([^}]*)\}", bare):
        known = set(SERIES[name].labels) | TARGET_LABELS if name in SERIES else set()
        found += [f"{name} has no label {label}" for label in re.findall(r"(\w+)\s*[=!]", labels) if label not in known]
    named = {label for name in NAME.findall(bare) if name in SERIES for label in SERIES[name].labels} | TARGET_LABELS
    for labels in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", bare):
        found += [f"no metric here has {label}" for label in re.findall(r"\w+", labels) if label not in named]
    for name in re.findall(r"(?:rate|increase)\((octavo_\w+)", bare):
        if name in SERIES and SERIES[name].kind is MetricKind.GAUGE:
            found.append(f"{name} is a gauge: rate() means nothing")
    for name in re.findall(r"histogram_quantile\([^,]+, sum by \([^)]*le\) \(rate\((octavo_\w+)", bare):
        found += [] if name.endswith("_bucket") else [f"{name} has no buckets"]
    return found


@pytest.mark.parametrize(("name", "expr"), expressions())
def test_an_expression_names_what_exists(name, expr):
    assert "octavo_" in expr
    assert not faults(expr), name


def sections():
    text = (ROOT / "docs/runbook.md").read_text()
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_alert_has_a_section_and_each_section_an_alert():
    assert set(sections()) == set(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        for part in ("**Meaning.**", "**Check.**", "**Remedy.**"):
            assert sections()[name].count(part) == 1, name


OTHERS = {"--previous", "--latency", "--cacert", "--cert", "--key"}  # flags of kubectl, valkey-cli and curl


def test_the_runbook_names_what_exists():
    """Commands, flags, metrics, and panels of the dashboard."""
    text = (ROOT / "docs/runbook.md").read_text()
    (found,) = [action.choices for action in parser()._actions if action.dest == "command"]
    assert set(re.findall(r"(?:`|^)octavo (\w+)", text, flags=re.M)) <= set(found)
    settings = (option.flag for cls in CLASSES.values() for option in options_of(cls).values())
    flags = {flag for each in found.values() for action in each._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= flags | {*settings} | OTHERS
    assert set(NAME.findall(text)) <= set(SERIES)
    titles = {panel["title"] for panel in dashboard()["panels"]}
    assert {" ".join(each.split()) for each in re.findall(r"panels? \*([^*]+)\*", text)} <= titles


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_monitors_find_every_pod_and_its_port(kind):
    for profile in ("default", "gpu", "cells"):
        objects = by_name(template(*ON, f"--set=watching.monitor.kind={kind}", profile=profile))
        found = set()
        for monitor in of_kind(objects, kind).values():
            spec = monitor["spec"]
            (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
            assert endpoint["path"] == "/metrics"
            wanted = spec["selector"]["matchLabels"].items()
            selectors = [wanted]
            if kind == "ServiceMonitor":
                services = [
                    each
                    for each in of_kind(objects, "Service").values()
                    if wanted <= each["metadata"]["labels"].items()
                ]
                assert services
                for service in services:
                    (port,) = [each for each in service["spec"]["ports"] if each["name"] == endpoint["port"]]
                    assert port["targetPort"] == "web"
                selectors = [each["spec"]["selector"].items() for each in services]
            for component, pod, container in programs(objects):
                labels = pod["metadata"]["labels"].items()
                if any(selector <= labels for selector in selectors):
                    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                    listen = settings_of(component, container).web_listen
                    assert listen == f"0.0.0.0:{ports['web']}"
                    name = pod["metadata"]["labels"]["app.kubernetes.io/component"], str(sorted(labels))
                    assert name not in found, "scraped twice"
                    found.add(name)
                    assert endpoint["scheme"] == "https"
                    added = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
                    meta = ("__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label) for label, _ in labels)
                    source = {"release": "app_kubernetes_io_instance", "cell": "octavo_cell"}
                    assert added == {name: [f"__meta_kubernetes_pod_label_{label}"] for name, label in source.items()}
                    assert {source["release"], *([source["cell"]] if profile == "cells" else [])} <= {
                        each.removeprefix("__meta_kubernetes_pod_label_") for each in meta
                    }
        assert len(found) == len(programs(objects))


@pytest.mark.parametrize("cells", [(), ("-a", "-b")])
def test_monitors_show_the_certificate_of_an_operator_and_know_whom_they_ask(cells):
    options = ["--set=cells[0].name=a,cells[1].name=b"] if cells else []
    objects = by_name(template(*ON, *options))
    for name, monitor in of_kind(objects, "PodMonitor").items():
        tls = monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"]
        assert tls["cert"]["secret"]["name"] == tls["ca"]["secret"]["name"] == tls["keySecret"]["name"]
        shown = objects["Certificate", tls["cert"]["secret"]["name"]]["spec"]
        assert shown["uris"] == [PeerRole.OPERATOR.uri]
        for cell in cells or ("",):
            answers = objects["Certificate", f"trial-octavo{cell}-{name.rpartition('-')[2]}-tls"]["spec"]
            assert tls["serverName"] in answers["dnsNames"]
            assert len(set(answers["dnsNames"])) == len(answers["dnsNames"])


def test_prometheus_can_read_every_expression(tmp_path):
    promtool("check", "rules", WATCHING / "alerts.yaml")
    exprs = [re.sub(r"\$__rate_interval", "5m", expr) for _, expr in expressions()]
    records = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(exprs)]
    panels = tmp_path / "panels.yaml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    promtool("check", "rules", panels)


ROUTER_POD = 'octavo_build_info{namespace="n",pod="r",program="router"}'
WORKER_POD = 'octavo_build_info{namespace="n",pod="w",program="worker"}'


def slow(name, labels, bound):
    """A histogram of which every value is above the bound."""
    return {
        f'{name}_bucket{{namespace="n",{labels}le="{bound}"}}': "0x120",
        f'{name}_bucket{{namespace="n",{labels}le="300.0"}}': "0+60x120",
        f'{name}_bucket{{namespace="n",{labels}le="+Inf"}}': "0+60x120",
    }


# What Prometheus has read, a minute apart, when each alert fires; and below when none does.
FIRES = {
    "OctavoNoRouterServes": {'octavo_serving{namespace="n",pod="r"}': "0x120", ROUTER_POD: "1x120"},
    "OctavoIsNotSeen": {WORKER_POD: "1x120"},
    "OctavoNoWorkers": {
        'octavo_workers{namespace="n",pod="r",model="m",state="available"}': "0x120",
        'octavo_workers{namespace="n",pod="r",model="m",state="lost"}': "2x120",
        'octavo_workers{namespace="n",pod="r",model="other",state="available"}': "1x120",
        'octavo_waits_for_workers{namespace="n",pod="r"}': "0x120",
    },
    "OctavoWorkerDoesNotServe": {
        'octavo_serving{namespace="n",pod="w"}': "0x120",
        'octavo_draining{namespace="n",pod="w"}': "0x120",
        WORKER_POD: "1x120",
    },
    "OctavoRestarts": {'octavo_up_seconds{namespace="n",pod="w"}': "900x25 1 60 1 60 1 60 1x120"},
    "OctavoStoreFails": {'octavo_store_errors_total{namespace="n",pod="r",function="pop"}': "0+60x120"},
    "OctavoStoreIsSlow": slow("octavo_journal_seconds", 'pod="w",', "0.1"),
    "OctavoHistoryLost": {'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="lost"}': "0x35 1x120"},
    "OctavoRequestsFail": {
        'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="error"}': "0+2x120",
        'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="stop"}': "0+60x120",
    },
    "OctavoRequestsAreRefused": {
        'octavo_requests_refused_total{namespace="n",pod="r",reason="QUEUE_FULL"}': "0+60x120"
    },
    "OctavoRequestsWait": {'octavo_waiting_oldest_seconds{namespace="n",pod="r",class="default"}': "45x120"},
    "OctavoFirstTokensAreSlow": slow("octavo_first_token_seconds", 'pod="r",model="m",', "10.0"),
    "OctavoTokensAreSlow": slow("octavo_token_seconds", 'pod="r",model="m",', "0.5"),
    "OctavoStepsStandStill": {
        'octavo_branches_running{namespace="n",pod="w"}': "3x120",
        'octavo_steps_total{namespace="n",pod="w"}': "77x120",
    },
    "OctavoStepsFail": {'octavo_steps_failed_total{namespace="n",pod="w"}': "0x35 1x120"},
    "OctavoWorkersAreLost": {'octavo_takes_total{namespace="n",pod="r",reason="lease"}': "0x35 4x120"},
    "OctavoBlocksAreShort": {'octavo_preemptions_total{namespace="n",pod="w",kind="swap"}': "0+60x120"},
    "OctavoMovesFail": {
        'octavo_migrations_total{namespace="n",pod="w",outcome="stayed"}': "0+9x120",
        'octavo_migrations_total{namespace="n",pod="w",outcome="moved"}': "0+3x120",
    },
    "OctavoCallsAreRefused": {
        'octavo_calls_refused_total{namespace="n",pod="r",listener="grpc",reason="NO_KEY"}': "0+60x120"
    },
    "OctavoKeysExpire": {'octavo_api_keys{namespace="n",pod="r",state="expiring"}': "2x120"},
}
QUIET = {
    "a cluster that works": {
        'octavo_serving{namespace="n",pod="r"}': "1x120",
        'octavo_serving{namespace="n",pod="w"}': "1x120",
        ROUTER_POD: "1x120",
        WORKER_POD: "1x120",
        'octavo_workers{namespace="n",pod="r",model="m",state="available"}': "1x120",
        'octavo_branches_running{namespace="n",pod="w"}': "3x120",
        'octavo_steps_total{namespace="n",pod="w"}': "0+900x120",
        'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="stop"}': "0+60x120",
        'octavo_takes_total{namespace="n",pod="r",reason="queued"}': "0+60x120",
        'octavo_up_seconds{namespace="n",pod="w"}': "0+60x120",
    },
    "one router of two": {
        'octavo_serving{namespace="n",pod="r"}': "0x120",
        'octavo_serving{namespace="n",pod="r2"}': "1x120",
        ROUTER_POD: "1x120",
        'octavo_build_info{namespace="n",pod="r2",program="router"}': "1x120",
    },
    "a worker that drains": {
        'octavo_serving{namespace="n",pod="w"}': "0x120",
        'octavo_draining{namespace="n",pod="w"}': "1x120",
        WORKER_POD: "1x120",
    },
    "refusals that are the clients'": {
        'octavo_requests_refused_total{namespace="n",pod="r",reason="INVALID_ARGUMENT"}': "0+60x120"
    },
    "workers that were scaled to none": {
        'octavo_workers{namespace="n",pod="r",model="m",state="available"}': "0x120",
        'octavo_waits_for_workers{namespace="n",pod="r"}': "1x120",
    },
    "bulk work waits": {'octavo_waiting_oldest_seconds{namespace="n",pod="r",class="bulk"}': "900x120"},
}


def of_cell(cell, series):
    """The series of a cell, with the labels that the monitors add."""
    added = f'namespace="n",release="octavo",cell="{cell}",'
    return {name.replace('namespace="n",', added): values for name, values in series.items()}


# The counters of a process that starts half an hour after Prometheus, and that is scraped before its first event.
COUNTED = {"loss": "_x32 0x3 1x120", "many": "_x20 0x3 60+60x120"}
FIRST_EVENTS = {
    name: {
        series: COUNTED["loss" if " 1x" in values or " 4x" in values else "many"] if "_total{" in series else values
        for series, values in FIRES[name].items()
    }
    for name in FIRES
    if any("_total{" in series for series in FIRES[name])
} | {
    "OctavoRequestsFail": {
        'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="error"}': COUNTED["many"],
        'octavo_requests_ended_total{namespace="n",pod="r",model="m",reason="stop"}': COUNTED["many"],
    },
    "OctavoMovesFail": {
        'octavo_migrations_total{namespace="n",pod="w",outcome="stayed"}': COUNTED["many"],
        'octavo_migrations_total{namespace="n",pod="w",outcome="moved"}': "_x20 0x120",
    },
    "OctavoStepsStandStill": {
        'octavo_branches_running{namespace="n",pod="w"}': "_x20 3x120",
        'octavo_steps_total{namespace="n",pod="w"}': "_x20 0x120",
    },
}

HEALTHY = QUIET["a cluster that works"]
# In one cell, while the other one works.
FIRES_OF_CELLS = [
    (name, of_cell("a", HEALTHY) | of_cell("b", HEALTHY | FIRES[name]))
    for name in ("OctavoNoRouterServes", "OctavoNoWorkers", "OctavoRequestsFail", "OctavoMovesFail")
] + [("OctavoIsNotSeen", of_cell("a", HEALTHY) | of_cell("b", {ROUTER_POD: "1x20 _x100"}))]


def test_every_alert_has_a_case():
    assert set(FIRES) == set(rules())
    counted = {name for name, rule in rules().items() if "_total" in rule["expr"]}
    assert set(FIRST_EVENTS) == counted
    for name, series in FIRST_EVENTS.items():
        begun = {values for each, values in series.items() if "_total{" in each}
        assert begun, name
        assert all(re.match(r"_x\d+ 0x", values) for values in begun), name


def test_each_alert_fires_when_it_should_and_no_other(tmp_path):
    seen = {ROUTER_POD: "1x120"}
    cases = [((seen if name != "OctavoIsNotSeen" else {}) | series, [name]) for name, series in FIRES.items()]
    cases += [(seen | series, []) for series in QUIET.values()]
    cases += [(series, [name]) for name, series in FIRES_OF_CELLS]
    cases += [(seen | series, [name]) for name, series in FIRST_EVENTS.items()]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "40m",
                    "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected],
                }
            ],
        }
        for series, expected in cases
    ]
    path = tmp_path / "alerts_test.yaml"
    rule_files = [str(WATCHING / "alerts.yaml")]
    path.write_text(yaml.safe_dump({"rule_files": rule_files, "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)
