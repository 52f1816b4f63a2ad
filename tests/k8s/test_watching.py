"""Dashboard and alerts name only metrics that exist, with labels that they have; each alert fires and is explained."""

import json
import re

import pytest
import yaml
from rendered_chart import (
    CHART,
    CLASSES,
    ROOT,
    by_name,
    of_kind,
    ports_of,
    programs,
    promtool,
    promtool_tests,
    settings_of,
    template,
)

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
@pytest.mark.parametrize("profile", ["default", "gpu", "cells"])
def test_the_monitors_find_every_pod_and_its_port(kind, profile):
    objects, found = by_name(template(*ON, f"--set=watching.monitor.kind={kind}", profile=profile)), []
    sources = {"release": "app_kubernetes_io_instance"} | ({"cell": "octavo_cell"} if profile == "cells" else {})
    for monitor in of_kind(objects, kind).values():
        spec = monitor["spec"]
        (endpoint,) = spec["podMetricsEndpoints" if kind == "PodMonitor" else "endpoints"]
        assert (endpoint["path"], endpoint["scheme"]) == ("/metrics", "https")
        added = {rule["targetLabel"]: rule["sourceLabels"] for rule in endpoint["relabelings"]}
        wanted = {"release": "app_kubernetes_io_instance", "cell": "octavo_cell"}
        assert added == {name: [f"__meta_kubernetes_pod_label_{label}"] for name, label in wanted.items()}
        selectors = [spec["selector"]["matchLabels"].items()]
        if kind == "ServiceMonitor":
            services = of_kind(objects, "Service").values()
            services = [each for each in services if selectors[0] <= each["metadata"]["labels"].items()]
            assert services
            for each in services:
                assert {port["name"]: port["targetPort"] for port in each["spec"]["ports"]}[endpoint["port"]] == "web"
            selectors = [each["spec"]["selector"].items() for each in services]
        for component, pod, container in programs(objects):
            labels = pod["metadata"]["labels"]
            if any(selector <= labels.items() for selector in selectors):
                assert settings_of(component, container).web_listen == f"0.0.0.0:{ports_of(container)['web']}"
                assert {*sources.values()} <= {re.sub(r"\W", "_", label) for label in labels}
                found.append(sorted(labels.items()))
    expected = [sorted(pod["metadata"]["labels"].items()) for _, pod, _ in programs(objects)]
    assert sorted(found) == sorted(expected), "not seen, or scraped twice"


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
    exprs = [expr.replace("$__rate_interval", "5m") for _, expr in expressions()]
    records = [{"record": f"panel:{i}", "expr": expr} for i, expr in enumerate(exprs)]
    panels = tmp_path / "panels.yaml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    promtool("check", "rules", panels)


ROUTER_POD, WORKER_POD = (f'octavo_build_info{{pod="{name[0]}",program="{name}"}}' for name in ("router", "worker"))
ENDED, REFUSED = 'octavo_requests_ended_total{pod="r",model="m",', 'octavo_requests_refused_total{pod="r",'
AVAILABLE = 'octavo_workers{pod="r",model="m",state="available"}'
RUNNING, STEPS = 'octavo_branches_running{pod="w"}', 'octavo_steps_total{pod="w"}'
MOVES = 'octavo_migrations_total{pod="w",'
# What Prometheus reads, a minute apart: always 0 and 1, more and more, and counters of a process that starts half an
# hour later and is scraped before its first event.
NONE, ONE, MORE = "0x120", "1x120", "0+60x120"
ONE_LATE, MANY_LATE = "_x32 0x3 1x120", "_x20 0x3 60+60x120"


def slow(name, labels, bound):
    """A histogram of which every value is above the bound."""
    return {f'{name}_bucket{{{labels}le="{le}"}}': NONE if le == bound else MORE for le in (bound, "300.0", "+Inf")}


# When each alert fires; and below when none does.
FIRES = {
    "OctavoNoRouterServes": {'octavo_serving{pod="r"}': NONE, ROUTER_POD: ONE},
    "OctavoIsNotSeen": {WORKER_POD: ONE},
    "OctavoNoWorkers": {
        AVAILABLE: NONE,
        'octavo_workers{pod="r",model="m",state="lost"}': "2x120",
        'octavo_workers{pod="r",model="other",state="available"}': ONE,
        'octavo_waits_for_workers{pod="r"}': NONE,
    },
    "OctavoWorkerDoesNotServe": {'octavo_serving{pod="w"}': NONE, 'octavo_draining{pod="w"}': NONE, WORKER_POD: ONE},
    "OctavoRestarts": {'octavo_up_seconds{pod="w"}': "900x25 1 60 1 60 1 60 1x120"},
    "OctavoStoreFails": {'octavo_store_errors_total{pod="r",function="pop"}': MORE},
    "OctavoStoreIsSlow": slow("octavo_journal_seconds", 'pod="w",', "0.1"),
    "OctavoHistoryLost": {f'{ENDED}reason="lost"}}': "0x35 1x120"},
    "OctavoRequestsFail": {f'{ENDED}reason="error"}}': "0+2x120", f'{ENDED}reason="stop"}}': MORE},
    "OctavoRequestsAreRefused": {f'{REFUSED}reason="QUEUE_FULL"}}': MORE},
    "OctavoRequestsWait": {'octavo_waiting_oldest_seconds{pod="r",class="default"}': "45x120"},
    "OctavoFirstTokensAreSlow": slow("octavo_first_token_seconds", 'pod="r",model="m",', "10.0"),
    "OctavoTokensAreSlow": slow("octavo_token_seconds", 'pod="r",model="m",', "0.5"),
    "OctavoStepsStandStill": {RUNNING: "3x120", STEPS: "77x120"},
    "OctavoStepsFail": {'octavo_steps_failed_total{pod="w"}': "0x35 1x120"},
    "OctavoWorkersAreLost": {'octavo_takes_total{pod="r",reason="lease"}': "0x35 4x120"},
    "OctavoBlocksAreShort": {'octavo_preemptions_total{pod="w",kind="swap"}': MORE},
    "OctavoMovesFail": {f'{MOVES}outcome="stayed"}}': "0+9x120", f'{MOVES}outcome="moved"}}': "0+3x120"},
    "OctavoCallsAreRefused": {'octavo_calls_refused_total{pod="r",listener="grpc",reason="NO_KEY"}': MORE},
    "OctavoKeysExpire": {'octavo_api_keys{pod="r",state="expiring"}': "2x120"},
}
HEALTHY = {  # a cluster that works
    **dict.fromkeys(('octavo_serving{pod="r"}', 'octavo_serving{pod="w"}', ROUTER_POD, WORKER_POD, AVAILABLE), ONE),
    RUNNING: "3x120",
    STEPS: "0+900x120",
    f'{ENDED}reason="stop"}}': MORE,
    'octavo_takes_total{pod="r",reason="queued"}': MORE,
    'octavo_up_seconds{pod="w"}': MORE,
}
QUIET = [
    HEALTHY,
    {  # one router of two
        'octavo_serving{pod="r"}': NONE,
        'octavo_serving{pod="r2"}': ONE,
        ROUTER_POD: ONE,
        'octavo_build_info{pod="r2",program="router"}': ONE,
    },
    {'octavo_serving{pod="w"}': NONE, 'octavo_draining{pod="w"}': ONE, WORKER_POD: ONE},  # a worker that drains
    {f'{REFUSED}reason="INVALID_ARGUMENT"}}': MORE},  # refusals that are the clients'
    {AVAILABLE: NONE, 'octavo_waits_for_workers{pod="r"}': ONE},  # workers that were scaled to none
    {'octavo_waiting_oldest_seconds{pod="r",class="bulk"}': "900x120"},  # bulk work waits
]
FIRST_EVENTS = {
    name: {
        series: (ONE_LATE if " 1x" in values or " 4x" in values else MANY_LATE) if "_total{" in series else values
        for series, values in FIRES[name].items()
    }
    for name in FIRES
    if any("_total{" in series for series in FIRES[name])
} | {
    "OctavoRequestsFail": dict.fromkeys((f'{ENDED}reason="error"}}', f'{ENDED}reason="stop"}}'), MANY_LATE),
    "OctavoMovesFail": {f'{MOVES}outcome="stayed"}}': MANY_LATE, f'{MOVES}outcome="moved"}}': "_x20 0x120"},
    "OctavoStepsStandStill": {RUNNING: "_x20 3x120", STEPS: "_x20 0x120"},
}


def of_cell(cell, series):
    """The series of a cell, with the labels that the monitors add."""
    return {name.replace("{", f'{{release="octavo",cell="{cell}",'): values for name, values in series.items()}


# In one cell, while the other one works.
FIRES_OF_CELLS = [
    (name, of_cell("a", HEALTHY) | of_cell("b", HEALTHY | FIRES[name]))
    for name in ("OctavoNoRouterServes", "OctavoNoWorkers", "OctavoRequestsFail", "OctavoMovesFail")
] + [("OctavoIsNotSeen", of_cell("a", HEALTHY) | of_cell("b", {ROUTER_POD: "1x20 _x100"}))]


def test_every_alert_has_a_case():
    assert set(FIRES) == set(rules())
    assert set(FIRST_EVENTS) == {name for name, rule in rules().items() if "_total" in rule["expr"]}
    for name, series in FIRST_EVENTS.items():
        begun = {values for each, values in series.items() if "_total{" in each}
        assert begun and all(re.match(r"_x\d+ 0x", values) for values in begun), name


def test_each_alert_fires_when_it_should_and_no_other(tmp_path):
    seen = {ROUTER_POD: ONE}
    cases = [((seen if name != "OctavoIsNotSeen" else {}) | series, [name]) for name, series in FIRES.items()]
    cases += [(seen | series, []) for series in QUIET]
    cases += [(series, [name]) for name, series in FIRES_OF_CELLS]
    cases += [(seen | series, [name]) for name, series in FIRST_EVENTS.items()]
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = [
        (
            {name.replace("{", '{namespace="n",'): values for name, values in series.items()},
            [(expr, [(f'{{alertname="{name}"}}', 1) for name in expected])],
        )
        for series, expected in cases
    ]
    promtool_tests(tmp_path, tests, "40m", [str(WATCHING / "alerts.yaml")])
