"""The chart as Helm renders it. `make test-chart` brings the tools; tests that need a missing one are skipped."""

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import yaml

from octavo.settings.loading import parse
from octavo.settings.options import options_of
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s/chart"
BIN = Path(sys.executable).parent
PROFILES = ["default", *sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())]
CLASSES = {"router": RouterSettings, "worker": WorkerSettings}
INSECURE = ("--set", "security.insecure=true")


def tool(name):
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not here: `make test-chart` installs it")
    return str(BIN / name)


def run(*command, ok=True):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done.stdout if ok else done.stdout + done.stderr


def promtool(*command):
    path = shutil.which("promtool") or str(BIN / "promtool")
    if not shutil.which(path):
        pytest.skip("promtool is not here: `make test-chart` brings it where there is apt-get")
    done = subprocess.run([path, *map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def promtool_tests(folder, cases, at, rule_files=()):
    """Each case: series with their values, and what each expression then has for samples, (labels, value)."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": expr, "eval_time": at, "exp_samples": [{"labels": of, "value": v} for of, v in samples]}
                for expr, samples in expected
            ],
        }
        for series, expected in cases
    ]
    path = folder / "promtool_test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [*rule_files], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", path)


@functools.cache
def template(*options, helm="helm3", profile="default", ok=True):
    values = [] if profile == "default" else ["-f", CHART / f"ci/{profile}-values.yaml"]
    return same_password(run(tool(helm), "template", "trial", CHART, *values, *options, ok=ok))


def same_password(text):
    """The bundled store's password is another one each time, unless a cluster has it already."""
    return re.sub(r'^  password: "\w{40,}={0,2}"$', '  password: "bWFkZS1ieS1oZWxt"', text, flags=re.M)


def notes(folder, *options):
    """What Helm prints after an installation."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    text = (chart / "templates/NOTES.txt").read_text()
    (chart / "templates/notes.yaml").write_text("kind: Notes\nmetadata: {name: n}\ntext: |\n" + indent(text, "  "))
    rendered = run(tool("helm3"), "template", "trial", chart, "--namespace", "ns", *options)
    return by_name(rendered)["Notes", "n"]["text"]


def by_name(text):
    found = [each for each in yaml.safe_load_all(text) if each]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found), "two objects with one name"
    return named


def of_kind(objects, kind):
    return {name: each for (found, name), each in objects.items() if found == kind}


def component_of(each):
    return each["metadata"]["labels"]["app.kubernetes.io/component"]


def all_pods(objects):
    """Every pod template, and every pod of a hook, by kind and name: what has labels and a spec."""
    templates = {
        key: each["spec"]["template"] for key, each in objects.items() if key[0] in ("Deployment", "StatefulSet")
    }
    for key, each in objects.items():
        if key[0] == "LeaderWorkerSet":  # tests/k8s/test_groups.py looks at the pods that follow
            templates[key] = each["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    return templates | {key: each for key, each in objects.items() if key[0] == "Pod"}


def pods(objects):
    """One pod template of each component, for profiles that have one of each."""
    return {component_of(pod): pod for (kind, _), pod in all_pods(objects).items() if kind != "Pod"}


def programs(objects):
    """The component, the pod template and the container of every router and worker."""
    found = [(component_of(pod), pod) for pod in all_pods(objects).values()]
    return [(component, pod, pod["spec"]["containers"][0]) for component, pod in found if component in CLASSES]


def values_of(container):
    """The variables of a container that have a value."""
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def secrets_of(container):
    """Of which Secret, and which key of it, a container has variables."""
    entries = {entry["name"]: entry.get("valueFrom", {}).get("secretKeyRef") for entry in container.get("env", ())}
    return {name: (ref["name"], ref["key"]) for name, ref in entries.items() if ref}


def found_by(selector, templates):
    """The pod templates that have the labels."""
    return {key: pod for key, pod in templates.items() if selector.items() <= pod["metadata"]["labels"].items()}


def ports_of(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def settings_of(component, container, pod_ip="10.0.0.7"):
    """The settings that a container gives its program, as the program reads them."""
    cls = CLASSES[component]
    words = container.get("args", [])
    told = {"POD_IP": pod_ip, f"OCTAVO_{component.upper()}_STORE": "redis://store:6379/0"}
    environ = {
        name: value.replace("$(POD_IP)", told["POD_IP"])
        for name, value in (told | values_of(container)).items()
        if name.startswith("OCTAVO_")
    }
    return parse(cls, words, environ=environ)


def options_by_variable(component):
    return {option.variable: option for option in options_of(CLASSES[component]).values()}
