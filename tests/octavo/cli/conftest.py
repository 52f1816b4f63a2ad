"""A router for commands to talk to."""

import pytest
from scripted_router import Router, served_router


@pytest.fixture
def router():
    return Router()


@pytest.fixture
def endpoint(router):
    with served_router(router) as address:
        yield address
