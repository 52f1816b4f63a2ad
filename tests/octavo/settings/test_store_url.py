"""Which URLs of stores there are, and that a wrong one is told without its password."""

import pytest

from octavo.settings.loading import parse
from octavo.settings.router import RouterSettings
from octavo.settings.store_url import require_store_url
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings

GOOD = [
    "redis://store",
    "redis://[::1]:6379",
    "rediss://me:pass%40word@store.example:6380/2?ssl_ca_certs=/etc/ca.pem",
    "redis://:secret@store:1/",
    "redis://a:6379,b:6379/0",
    "rediss://me:se,cr%40t@a,[::1]:6380,c:1/2",
    "unix:///run/store.sock",
    "unix:///run/store.sock?db=1&password=secret",
    "memory://",
]
BAD = [
    ("foo://x", "must begin with redis://"),
    ("127.0.0.1:6379", "must begin with redis://"),
    ("redis:127.0.0.1", "must begin with redis://"),
    ("redis://", "must name a host"),
    ("redis://:6379", "must name a host"),
    ("redis://127.0.0.1:port/0", "must have a port"),
    ("redis://127.0.0.1:0/0", "must have a port"),
    ("redis://me:se/cret@127.0.0.1:1", "must have a port"),
    ("redis://h/zero", "number of a database"),
    ("redis://h/0?tls=yes", r"\?tls="),
    ("redis://a:6379,b:port/0", "must have a port"),
    ("redis://a,,b", "must name a host"),
    ("unix://", "must name a socket"),
]


def test_store_urls_are_told_from_others():
    for url in GOOD:
        require_store_url(url)
    for url, says in BAD:
        with pytest.raises(ValueError, match=says) as caught:
            require_store_url(url)
        assert "cret" not in str(caught.value)


@pytest.mark.parametrize("cls", [RouterSettings, WorkerSettings, UpSettings])
@pytest.mark.parametrize("source", ["flag", "variable"])
def test_every_program_refuses_it_and_hides_it(cls, source, capsys):
    url = "redis://me:secret@h:port"
    flags = [f"--store={url}"] if source == "flag" else []
    environ = {} if source == "flag" else {f"OCTAVO_{cls.program.upper()}_STORE": url}
    with pytest.raises(SystemExit) as ended:
        parse(cls, flags, environ=environ)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "must have a port" in said
    assert "secret" not in said
