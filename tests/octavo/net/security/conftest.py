"""Certificates, made once."""

from pathlib import Path

import pytest
from certificates import Certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return Certificates(Path(tmp_path_factory.mktemp("tls")))
