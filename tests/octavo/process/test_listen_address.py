"""Addresses on which programs listen."""

import pytest

from octavo.process.listen_address import exposure_warning, is_loopback, reachable_address, with_host
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings


@pytest.mark.parametrize(
    ("address", "host", "result"),
    [
        ("127.0.0.1:50051", "", "127.0.0.1:50051"),
        ("127.0.0.1:50051", "0.0.0.0", "0.0.0.0:50051"),
        ("127.0.0.1:7", "::", "[::]:7"),
        ("[::1]:7", "[fd00::1]", "[fd00::1]:7"),
        ("[::1]:7", "pod-0.octavo", "pod-0.octavo:7"),
    ],
)
def test_a_host_replaces_the_host_of_an_address(address, host, result):
    assert with_host(address, host) == result


@pytest.mark.parametrize("cls", [RouterSettings, WorkerSettings])
def test_the_address_of_a_program_has_the_host_and_the_port_of_listen(cls):
    assert cls(host="0.0.0.0", listen="127.0.0.1:9").address == "0.0.0.0:9"
    assert cls().address == cls().listen


@pytest.mark.parametrize(
    ("address", "alone"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("pod-0:1", False),
    ],
)
def test_who_can_reach_an_address(address, alone):
    assert is_loopback(address) == alone


def test_the_warning_names_the_exposed_addresses():
    assert exposure_warning(["127.0.0.1:1", "", "[::1]:2"]) == ""
    warning = exposure_warning(["0.0.0.0:50051", "127.0.0.1:51051", "10.0.0.1:7"])
    assert warning.startswith("0.0.0.0:50051 and 10.0.0.1:7: no TLS")


def test_every_interface_is_called_by_its_loopback():
    assert reachable_address("0.0.0.0:1") == "127.0.0.1:1"
    assert reachable_address("[::]:1") == "[::1]:1"
    assert reachable_address("10.0.0.1:1") == "10.0.0.1:1"
