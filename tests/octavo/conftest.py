import pytest


@pytest.fixture
def config(tmp_path):
    """Writes a TOML file of settings."""

    def write(text):
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return path

    return write
