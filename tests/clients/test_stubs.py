"""What protos/CLIENTS.md and protos/buf.gen.yaml say about generating stubs is what the generators do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF_COMMAND = re.compile(r"`(buf generate [^`]+) --output build/stubs`")
BLOCK = re.compile(r"^<!-- stubs -->\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Per plugin that may be missing here: a file that it makes of inference.proto.
MADE = {
    "grpc_cpp_plugin": "cpp/octavo/v1/inference.grpc.pb.h",
    "protoc-gen-go": "go/octavo/v1/inference.pb.go",
    "protoc-gen-go-grpc": "go/octavo/v1/inference_grpc.pb.go",
    "grpc_php_plugin": "php/Octavo/V1/InferenceClient.php",
    "grpc_python_plugin": "python/octavo/v1/inference_pb2_grpc.py",
    "grpc_ruby_plugin": "ruby/octavo/v1/inference_services_pb.rb",
}


@pytest.fixture
def plugins():
    """Those that are installed."""
    found = {name for name in MADE if shutil.which(name)}
    if not found or not shutil.which("protoc"):
        pytest.skip("protoc and the plugins of gRPC are not installed: tools/clients.sh cpp installs them")
    return found


def lines_for(plugins, text):
    """The lines of a script or template but those that name a plugin that is not installed."""
    missing = {*MADE} - plugins
    short = {name.removeprefix("protoc-gen-") + "_out" for name in missing}
    return "".join(line for line in text.splitlines(True) if not any(name in line for name in {*missing, *short}))


def check_files(directory, plugins):
    for plugin in plugins:
        assert (directory / MADE[plugin]).exists(), sorted(map(str, directory.rglob("*")))


def test_protoc(plugins, tmp_path):
    [block] = BLOCK.findall((ROOT / "protos/CLIENTS.md").read_text(encoding="utf-8"))
    script = lines_for(plugins, block).replace("build/stubs", str(tmp_path))
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, check=True)
    check_files(tmp_path, plugins)


def test_buf(plugins, tmp_path):
    template = tmp_path / "buf.gen.yaml"
    template.write_text(lines_for(plugins, (ROOT / "protos/buf.gen.yaml").read_text(encoding="utf-8")))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    [text] = BUF_COMMAND.findall((ROOT / "protos/CLIENTS.md").read_text(encoding="utf-8"))
    command = [*text.replace("protos/buf.gen.yaml", str(template)).split(), "--output", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, check=True)
    check_files(tmp_path, plugins)
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in made if "admin" in path.name.lower() or "internal" in path.parts]
