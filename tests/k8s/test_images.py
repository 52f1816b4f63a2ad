"""The Dockerfiles, as far as they can be checked without a Docker daemon; and the router's image, built as a folder."""

import re
import tomllib

import pytest
from rendered_chart import ROOT, run, tool

FILES = sorted((ROOT / "k8s/docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_is_content(path):
    run(tool("hadolint"), "--failure-threshold", "info", path)


@pytest.mark.parametrize("broken", [False, True])
def test_trivy_is_content_and_would_see_a_fault(broken, tmp_path):
    for path in FILES:
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace("USER 65532:65532\n", "") if broken else text)
    said = run(tool("trivy"), "config", "--skip-check-update", "--quiet", "--exit-code", "1", tmp_path, ok=not broken)
    assert said.count("DS-0002") == (len(FILES) if broken else 0)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_that_pip_installs_is_pinned(path):
    """By hashes; octavo itself and torch for CPUs, whose build is chosen, without what they need."""
    commands = re.findall(r"pip --python /opt/octavo install ([^\n]+)", path.read_text())
    locked = [command for command in commands if "--require-hashes" in command]
    [lock] = re.findall(r"--requirement (\S+)", " ".join(locked))
    assert lock == f"requirements/{path.name.removesuffix('.Dockerfile')}.txt"
    assert len(commands) > len(locked) == 1
    assert all("--no-deps" in command for command in commands if command not in locked)
    assert re.search(r"^ENV PIP_CONSTRAINT=/src/requirements/constraints.txt$", path.read_text(), re.MULTILINE)
    for base in re.findall(r"^(?:ARG BASE=|FROM )([^$\s]+:\S+)", path.read_text(), re.MULTILINE):
        assert re.search(r":(\d+\.\d+\.\d+|\${CUDA})", base), base


@pytest.mark.parametrize("name", ["router", "worker", "worker-cuda"])
def test_a_lock_has_what_pyproject_asks_for_at_the_versions_that_are_tested(name):
    locked = dict(
        re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)
    )
    tested = dict(
        re.findall(r"^([A-Za-z0-9-]+)==(\S+)", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE)
    )
    assert {each: version for each, version in locked.items() if tested.get(each, version) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["traces"], *extras[name.partition("-")[0]]]
    names = {re.match(r"[A-Za-z0-9-]+", each)[0].lower() for each in asked}
    assert names - set(locked) == ({"torch"} if name == "worker" else set())
    assert ("torch" in locked) == (name == "worker-cuda")
    assert any(each.startswith("nvidia-") for each in locked) == (name == "worker-cuda")
