"""The first calls in protos/CLIENTS.md do what they say, with the imports that a reader adds."""

import os
import re
import subprocess

import pytest
from example import EXAMPLES, languages

ROOT = EXAMPLES.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NODE_IMPORTS = "const grpc = require('@grpc/grpc-js'), loader = require('@grpc/proto-loader');\n"


def block(language):
    page = (ROOT / "protos" / "CLIENTS.md").read_text(encoding="utf-8")
    [text] = [text for name, text in BLOCK.findall(page) if name == language]
    return text


@pytest.mark.timeout(900)
@pytest.mark.skipif("node" not in languages(), reason="Node is not among the chosen languages")
@pytest.mark.parametrize("example", ["node"], indirect=True)
def test_node(example, cluster):
    script = NODE_IMPORTS + block("js").replace("127.0.0.1:50051", cluster.endpoints[0])
    script += "stream.on('end', () => router.close()); stream.on('error', (error) => { throw error; });"
    environment = {**os.environ, "NODE_PATH": str(EXAMPLES / "node" / "node_modules")}
    done = subprocess.run(["node", "-e", script], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif("ruby" not in languages(), reason="Ruby is not among the chosen languages")
@pytest.mark.parametrize("example", ["ruby"], indirect=True)
def test_ruby(example, cluster):
    script = block("ruby").replace("127.0.0.1:50051", cluster.endpoints[0])
    command = ["ruby", "-W0", "-I", ROOT / "build" / "examples" / "ruby", "-e", script]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
