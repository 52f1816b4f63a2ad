import socket

import pytest

from gpu_worker.serving.process.listener import Listener, NoAddress, advertised_address
from octavo.settings.worker import WorkerSettings


def host_means(monkeypatch, *addresses):
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("listen", "advertise", "host", "port"),
    [
        ("127.0.0.1:7", "", "127.0.0.1", None),
        ("0.0.0.0:7", "", "10.1.2.3", None),
        ("[::]:7", "", "10.1.2.3", None),
        ("0.0.0.0:7", "pod-3.workers", "pod-3.workers", None),
        ("127.0.0.1:7", "outside:80", "outside", 80),
        ("0.0.0.0:7", "[fd00::1]:80", "[fd00::1]", 80),
        ("0.0.0.0:7", "[fd00::1]", "[fd00::1]", None),
    ],
)
def test_what_routers_are_told(monkeypatch, listen, advertise, host, port):
    host_means(monkeypatch, "127.0.1.1", "fe80::1%eth0", "fd00::2", "10.1.2.3")
    assert advertised_address(listen, advertise) == (host, port)


async def test_a_listener_is_advertised_with_its_port_or_does_not_start(monkeypatch):
    host_means(monkeypatch, "10.1.2.3")
    listener = Listener(WorkerSettings(listen="0.0.0.0:0"))
    await listener.open()
    host, _, port = listener.endpoint.rpartition(":")
    assert host == "10.1.2.3" and int(port) > 0
    assert listener.worker_id == listener.service.worker_id == f"worker-10.1.2.3-{port}"
    await listener.close()
    host_means(monkeypatch, "127.0.1.1")
    with pytest.raises(NoAddress, match="--advertise"):
        Listener(WorkerSettings(listen="0.0.0.0:0"))
