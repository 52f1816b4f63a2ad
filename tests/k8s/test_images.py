"""The Dockerfiles, as far as they can be checked without a Docker daemon; and the router's image, built as a folder."""

import os
import re
import signal
import subprocess
import sys
import tomllib

import pytest
from rendered_chart import ROOT, run, tool

FILES = sorted((ROOT / "k8s/docker").glob("*.Dockerfile"))
PORTS = {"router": 50051, "worker": 50061}
MOST_BYTES = 200 * 10**6  # of the packages of a router


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
def test_it_copies_what_is_there_and_runs_as_nobody(path):
    text, program = path.read_text(), path.name.removesuffix(".Dockerfile").partition("-")[0]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = words.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(f"!{source}".startswith(line) for line in ignored if line.startswith("!")), source
    assert f"EXPOSE {PORTS[program]}" in text
    assert f'ENTRYPOINT ["octavo", "{program}"]' in text
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["65532:65532"]


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


def test_the_images_are_of_one_python_so_that_the_demo_model_has_one_path():
    versions = {re.search(r"python:?(3\.\d+)", path.read_text())[1] for path in FILES}
    assert versions == {"3.12"}


@pytest.mark.timeout(600)
def test_what_the_router_image_installs_runs_without_torch_and_without_the_worker(tmp_path):
    """The commands of router.Dockerfile, in an environment of its own."""
    text = (ROOT / "k8s/docker/router.Dockerfile").read_text()
    options = re.findall(r"--config-settings='?([^'\s]+)'?", text)
    assert len(options) == 2
    env = tmp_path / "octavo"
    run(sys.executable, "-m", "venv", env)
    settings = [f"--config-settings={option}" for option in options]
    source = tmp_path / "src"
    for name in ("pyproject.toml", "docs/package.md", "LICENSE", "requirements/constraints.txt", "csrc/CMakeLists.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name in ("octavo", "router"):
        run("cp", "-r", ROOT / name, source / name)
    install = [env / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*install, "--require-hashes", "--requirement", ROOT / "requirements/router.txt")
    run(*install, "--no-deps", source, *settings)
    run(env / "bin/pip", "check")
    size = int(run("du", "--summarize", "--block-size=1", env).split()[0])
    print(f"the router's packages: {size / 1e6:.0f} MB")
    assert size <= MOST_BYTES
    listed = run(env / "bin/pip", "list", "--format", "freeze").lower()
    assert "octavo==" in listed
    assert not re.search(r"^(torch|numpy|transformers)==", listed, re.MULTILINE)
    run(env / "bin/python", "-P", "-c", "import importlib.util as u; assert u.find_spec('gpu_worker') is None")
    command = [env / "bin/octavo", "router", "--store", f"unix://{tmp_path}/none.sock", "--insecure"]
    command += ["--host", "0.0.0.0"]
    words = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--web-listen", "127.0.0.1:0"]
    words += ["--http-listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "HOME": "/tmp"}
    ) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any("waiting for the store" in line for line in lines)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
