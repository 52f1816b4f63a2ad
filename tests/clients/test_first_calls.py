"""The first calls in protos/CLIENTS.md do what they say, with the imports that a reader adds."""

import os
import re
import subprocess

import pytest
from example import EXAMPLES, languages

ROOT = EXAMPLES.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NODE_IMPORTS = "const grpc = require('@grpc/grpc-js'), loader = require('@grpc/proto-loader');\n"
NODE_END = "stream.on('end', () => router.close()); stream.on('error', (error) => { throw error; });"


def block(language):
    page = (ROOT / "protos" / "CLIENTS.md").read_text(encoding="utf-8")
    [text] = [text for name, text in BLOCK.findall(page) if name == language]
    return text


PROGRAMS = {
    "node": lambda script: ["node", "-e", f"{NODE_IMPORTS}{script}{NODE_END}"],
    "ruby": lambda script: ["ruby", "-W0", "-I", ROOT / "build" / "examples" / "ruby", "-e", script],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", [name for name in PROGRAMS if name in languages()], indirect=True)
def test_the_page_prints_an_answer(example, cluster):
    script = block({"node": "js"}.get(example.language, example.language))
    command = PROGRAMS[example.language](script.replace("127.0.0.1:50051", cluster.endpoints[0]))
    environment = {**os.environ, "NODE_PATH": str(EXAMPLES / "node" / "node_modules")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
