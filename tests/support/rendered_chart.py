"""The chart as Helm renders it. `make test-chart` brings the tools; tests that need a missing one are skipped."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s/chart"
BIN = Path(sys.executable).parent
PROFILES = ["default", *sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())]


def tool(name):
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not here: `make test-chart` installs it")
    return str(BIN / name)


def run(*command, ok=True):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done.stdout if ok else done.stdout + done.stderr


def template(*options, helm="helm3", profile="default", ok=True):
    values = [] if profile == "default" else ["-f", CHART / f"ci/{profile}-values.yaml"]
    return run(tool(helm), "template", "trial", CHART, *values, *options, ok=ok)


def by_name(text):
    found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pods(objects):
    """The pod templates by component."""
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]
        for (kind, _), each in objects.items()
        if kind in ("Deployment", "StatefulSet")
    }
