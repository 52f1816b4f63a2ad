"""Servers for `octavo bench` to measure."""

from collections.abc import Iterator

import pytest
from scripted_endpoint import OpenAiServer, openai_server


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    with openai_server() as server:
        yield server
