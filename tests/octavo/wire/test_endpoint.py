"""How endpoints are written, and what is refused: by the parser, by settings, and by whoever connects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.settings.options import SettingsError
from octavo.settings.setting_sources import from_values
from octavo.settings.worker import WorkerSettings
from octavo.wire import endpoint

BAD = [
    *((f"127.0.0.1:{port}", "port must be 1 to 65535") for port in ("65536", "0", "-1", "http", "٣", "9" * 5000, " 7")),
    ("127.0.0.1", "has no port; write HOST:PORT, such as 127.0.0.1:50051"),
    ("127.0.0.1:", "has no port"),
    ("50051", "has no port; write HOST:PORT, such as 127.0.0.1:50051"),
    ("[::1]", "has no port; write HOST:PORT, such as [::1]:50051"),
    *((text, "has no host") for text in (":50051", "")),
    *((f"{host}:1", f"'{host}' is no host") for host in ("a b", "host/path", "user@host")),
    ("fd00::1:80", "goes in brackets"),
    *((text, r"must be \[ADDRESS\]:PORT") for text in ("[fd00::1:80", "[::1]80")),
    ("[host]:80", "'host' is no address of version 6"),
    ("grpc://host:80", "without grpc://"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_what_is_no_endpoint(text, why):
    with pytest.raises(ValueError, match=f"^.*{why}".replace("[::1]:5", r"\[::1\]:5")):
        endpoint.parse_endpoint(text)


@given(st.text(max_size=20))
def test_an_endpoint_is_read_as_written_or_refused_with_a_sentence(text):
    try:
        assert str(endpoint.parse_endpoint(text)).lower().startswith(text.rpartition(":")[0].lower())
    except ValueError as error:
        assert "int()" not in str(error)  # noqa: PT017 - any other outcome is the failure


TARGETS = "localhost:1 dns:///octavo:50051 dns:octavo:50051 dns://8.8.8.8/octavo:50051 ipv4:127.0.0.1:1,127.0.0.2:2"
TARGETS += " ipv6:[::1]:1,[::2]:2 unix:/run/octavo.sock unix:///run/octavo.sock unix-abstract:octavo"
NO_TARGETS = "dns:///octavo dns:octavo dns:///octavo:99999 ipv4:127.0.0.1 ipv6:[::1]:99999 unix: xds:///a:1"


@pytest.mark.parametrize("target", NO_TARGETS.split())
def test_what_a_client_may_name(target):
    assert endpoint.parse_targets(TARGETS.split()[4:]) == tuple(TARGETS.split()[4:])
    for good in TARGETS.split():
        assert endpoint.parse_targets([good]) == (good,)
    with pytest.raises(ValueError, match=f"^{target}: ".replace("[", r"\[").replace("]", r"\]")):
        endpoint.parse_targets(["localhost:1", target])


ADVERTISED = {"pod-3.workers": ("pod-3.workers", None), "outside:80": ("outside", 80)}
ADVERTISED |= {"[fd00::1]": ("[fd00::1]", None), "[fd00::1]:80": ("[fd00::1]", 80)}


@pytest.mark.parametrize("text", ["fd00::1", "fd00::abcd", "::", ":8080", ":", "host:", "host:a", "host:99999", "h:0"])
def test_what_a_worker_may_advertise(text):
    assert {each: endpoint.parse_advertised(each) for each in ADVERTISED} == ADVERTISED
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
