import pytest
from rendered_chart import PROFILES, by_name, template


@pytest.fixture(scope="session", params=PROFILES)
def profile(request):
    return request.param


@pytest.fixture(scope="session")
def objects(profile):
    """The objects of one profile by kind and name."""
    return by_name(template(profile=profile))
