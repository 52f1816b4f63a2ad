"""grpcurl and its like, run as a person would run them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def tool(name):
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def grpcurl(endpoint, *words, data=None, ok=True):
    command = [tool("grpcurl"), "-plaintext", *(["-d", json.dumps(data)] if data is not None else []), endpoint, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is ok, done.stderr
    return done.stdout if ok else done.stderr


def objects(text):
    """One JSON object after the other; older tools name fields as the proto does, newer ones in camel case."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(snake(value))
        text = text[end:]
    return found


def snake(value):
    if isinstance(value, dict):
        return {re.sub("([A-Z])", r"_\1", key).lower(): snake(item) for key, item in value.items()}
    return [snake(item) for item in value] if isinstance(value, list) else value
