"""`llm`, Simon Willison's command: a model file of his, a prompt, a stream, a schema, a tool, a conversation."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import BASE, MODEL, TELL, case, run

HOME = Path(tempfile.mkdtemp(prefix="llm-"))
FILE = f"""- model_id: octavo
  model_name: {MODEL}
  api_base: {BASE}
  supports_tools: true
  supports_schema: true
"""
TOOL = 'def weather(city: str) -> str:\n    "The weather of a city."\n    return "rain"\n'


def llm(*arguments):
    """What the command prints."""
    command = [Path(sys.executable).parent / "llm", *arguments]
    asked = {**os.environ, "LLM_USER_PATH": str(HOME), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prompt(*arguments, max_tokens):
    return llm("prompt", "-m", "octavo", "-o", "temperature", "0", "-o", "max_tokens", str(max_tokens), *arguments)


@case
def schema():
    person = json.loads(
        prompt("Invent a person with a name and an age. Answer in JSON.", "--schema", "name, age int", max_tokens=100)
    )
    assert isinstance(person["name"], str) and isinstance(person["age"], int)
    return person


@case
def tool():
    """Whether a small model calls it is up to the model."""
    return prompt("How is the weather in Oslo?", "--functions", TOOL, "--chain-limit", "2", max_tokens=40)


@case
def conversation():
    first = prompt("Name a sea.", max_tokens=16)
    return first, prompt("Another one?", "--continue", max_tokens=16)


HOME.joinpath("extra-openai-models.yaml").write_text(FILE)
run(
    whole=lambda: prompt(TELL, "--no-stream", max_tokens=32),
    stream=lambda: prompt(TELL, max_tokens=100),
)
