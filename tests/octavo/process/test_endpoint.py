"""How endpoints are written, and what is refused: by the parser, by settings, and by whoever connects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.process import endpoint
from octavo.process.endpoint import Endpoint
from octavo.settings.options import SettingsError
from octavo.settings.setting_sources import from_values
from octavo.settings.worker import WorkerSettings


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("octavo-router.default.svc:1", "octavo-router.default.svc", 1),
        ("my_host:65535", "my_host", 65535),
        ("[::1]:7", "[::1]", 7),
        ("[fe80::1%eth0]:7", "[fe80::1%eth0]", 7),
    ],
)
def test_a_host_and_a_port(text, host, port):
    assert endpoint.parse_endpoint(text) == Endpoint(host, port)
    assert str(Endpoint(host, port)) == text


@given(st.text(max_size=20))
def test_any_text_is_an_endpoint_or_refused(text):
    try:
        assert str(endpoint.parse_endpoint(text)).lower().startswith(text.rpartition(":")[0].lower())
    except ValueError as error:
        assert "int()" not in str(error)  # noqa: PT017 - any other outcome is the failure


@pytest.mark.parametrize(
    "target",
    ["dns:///octavo", "dns:octavo", "dns:///octavo:99999", "ipv4:127.0.0.1", "ipv6:[::1]:99999", "unix:", "xds:///a:1"],
)
def test_what_a_client_may_not_name(target):
    with pytest.raises(ValueError, match=f"^{target}: ".replace("[", r"\[").replace("]", r"\]")):
        endpoint.parse_targets(["localhost:1", target])


@pytest.mark.parametrize("text", ["fd00::1", "fd00::abcd", "::", ":8080", ":", "host:", "host:a", "host:99999", "h:0"])
def test_what_a_worker_may_not_advertise(text):
    with pytest.raises(SettingsError, match=f"^advertise '{text}'"):
        from_values(WorkerSettings, {"advertise": text})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("a:1;", "cell 1 of 2: at least one HOST:PORT"),
        ("a:1;b:2,c:0;d:4", "cell 1 of 3: c:0: port must be 1 to 65535"),
        ([["a:1"], []], "cell 1 of 2: at least one HOST:PORT"),
        ([], "at least one HOST:PORT"),
        ("a", "^a: has no port"),
    ],
)
def test_the_error_of_a_wrong_cell_says_which(given, says):
    with pytest.raises(ValueError, match=says):
        endpoint.parse_cells(given)
