"""The Dockerfiles, as far as they can be checked without a Docker daemon; and the router's image, built as a folder."""

import os
import re
import signal
import subprocess
import sys

import pytest
from rendered_chart import ROOT, run, tool

FILES = sorted((ROOT / "k8s/docker").glob("*.Dockerfile"))
PROGRAMS = {"router": 50051, "worker": 50061}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hadolint_is_content(path):
    run(tool("hadolint"), "--failure-threshold", "warning", path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_copies_what_is_there_and_runs_as_nobody(path):
    text, program = path.read_text(), path.name.removesuffix(".Dockerfile")
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, _ = words.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(f"!{source}".startswith(line) for line in ignored if line.startswith("!")), source
    assert f"EXPOSE {PROGRAMS[program]}" in text
    assert f'ENTRYPOINT ["octavo", "{program}"]' in text
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["65532:65532"]


def test_the_images_are_of_one_python_so_that_the_demo_model_has_one_path():
    assert len({re.search(r"^ARG PYTHON=(.+)$", path.read_text(), re.MULTILINE)[1] for path in FILES}) == 1


@pytest.mark.timeout(300)
def test_what_the_router_image_installs_runs_without_torch_and_without_the_worker(tmp_path):
    """The commands of router.Dockerfile, in an environment of its own."""
    text = (ROOT / "k8s/docker/router.Dockerfile").read_text()
    options = re.findall(r"--config-settings='?([^'\s]+)'?", text)
    assert len(options) == 2
    env = tmp_path / "octavo"
    run(sys.executable, "-m", "venv", env)
    settings = [f"--config-settings={option}" for option in options]
    constraints = ["--constraint", ROOT / "requirements/constraints.txt"]
    source = tmp_path / "src"
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements/constraints.txt", "csrc/CMakeLists.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    for name in ("octavo", "router"):
        run("cp", "-r", ROOT / name, source / name)
    run(
        env / "bin/pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *constraints,
        f"{source}[router]",
        *settings,
    )
    listed = run(env / "bin/pip", "list", "--format", "freeze").lower()
    assert "octavo==" in listed
    assert not re.search(r"^(torch|numpy|transformers)==", listed, re.MULTILINE)
    run(env / "bin/python", "-P", "-c", "import importlib.util as u; assert u.find_spec('gpu_worker') is None")
    command = [env / "bin/octavo", "router", "--store", f"unix://{tmp_path}/none.sock", "--host", "0.0.0.0"]
    words = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, *words], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "HOME": "/tmp"}
    ) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any("waiting for the store" in line for line in lines)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
