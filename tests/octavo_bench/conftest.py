"""Servers for `octavo bench` to measure."""

import pytest
from scripted_endpoint import openai_server
from scripted_router import Router, served_router


@pytest.fixture
def server():
    with openai_server() as server:
        yield server


@pytest.fixture
def endpoint():
    with served_router(Router()) as address:
        yield address
