from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a TOML file of settings."""

    def write(text: str) -> Path:
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return path

    return write
