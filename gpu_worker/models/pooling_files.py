"""What a model's folder says of vectors: sentence-transformers' modules.json, or config.json of a model that judges."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.model_files.json_file import read_json
from octavo.pooling.params import ModelPooling, PoolKind
from octavo.request.errors import BadModel

MODULES = "modules.json"
KINDS = {"lasttoken": PoolKind.LAST, "mean": PoolKind.MEAN, "mean_tokens": PoolKind.MEAN}
PREFIX = "pooling_mode_"


def read_pooling(name: str, directory: Path, config: Mapping[str, Any], hidden_size: int) -> ModelPooling:
    """What requests get that say nothing. Without a word of the files: the last token's state, of length 1."""
    judge = "qwen3" if _is_qwen3_reranker(name, directory, config) else ""
    if not (directory / MODULES).is_file():
        return ModelPooling(hidden_size, judge=judge)
    modules = _content(directory / MODULES)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise BadModel(f"{MODULES}: not a list of modules")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        why = f"{MODULES} has a module {unknown[0][:64]!r}, which octavo does not run"
        return ModelPooling(hidden_size, judge=judge, refusal="" if judge else why)
    pooling = next((each for each in modules if str(each.get("type", "")).endswith("Pooling")), None)
    named = _named_kind(directory, str(pooling.get("path", ""))) if pooling else "lasttoken"
    refusal = "" if named in KINDS else f"the model's pooling {named!r} is none of {', '.join(KINDS)}"
    return ModelPooling(hidden_size, KINDS.get(named, PoolKind.LAST), "Normalize" in kinds, judge, refusal)


def _named_kind(directory: Path, folder: str) -> str:
    """The pooling of the module in this folder, as sentence-transformers names it."""
    if Path(folder).name != folder or folder in ("", "..") or not (directory / folder / "config.json").is_file():
        raise BadModel(f"{MODULES}: {folder[:64]!r} is not a folder beside it with a config.json")
    config = _content(directory / folder / "config.json")
    if not isinstance(config, dict):
        raise BadModel(f"{folder}/config.json: not an object")
    if isinstance(named := config.get("pooling_mode"), str):
        return named[:64]
    chosen = [key.removeprefix(PREFIX) for key, value in config.items() if key.startswith(PREFIX) and value is True]
    return "+".join(sorted(chosen))[:64] or "none"


def _is_qwen3_reranker(name: str, directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether the model judges by the likelihoods of yes and no. Its files do not always say so; its name does."""
    if config.get("is_original_qwen3_reranker") is True:
        return True
    return config.get("model_type") == "qwen3" and "reranker" in f"{name} {directory.name}".lower()


def _content(path: Path) -> object:
    try:
        return read_json(path)
    except ValueError as error:
        raise BadModel(f"{path.name}: not JSON: {error}") from error
