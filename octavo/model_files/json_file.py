"""Reads the JSON files of a model. Whatever is in them, the reader ends with their content or with a ValueError."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20  # those of published models have a few MiB at most
FLOATS = {"Infinity": float("inf"), "-Infinity": -float("inf"), "NaN": float("nan")}


def read_json(path: Path) -> Any:
    """The content of the file. Raises OSError, and ValueError for one that is too large, too deep or no JSON."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes are too many for a file of JSON: at most {MAX_BYTES} are read")
    try:
        return json.loads(path.read_bytes(), object_hook=_float_or_same)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def _float_or_same(content: dict[str, Any]) -> Any:
    """Transformers writes the floats that JSON does not have as {"__float__": "Infinity"}, and the like."""
    name = content.get("__float__") if len(content) == 1 else None
    return FLOATS.get(name, content) if isinstance(name, str) else content
