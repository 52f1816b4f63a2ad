"""The trail of refusals: every one is counted, few of a flood are logged, and what a peer says cannot forge a line."""

import asyncio
import logging
import ssl

import pytest
from certificates import Certificates
from hypothesis import given
from hypothesis import strategies as st

from octavo.net.http_server import HttpServer
from octavo.net.security import trail
from octavo.net.security.trail import (
    AccessReason,
    AccessTrail,
    Caller,
    LineLimiter,
    ListenerKind,
    printable,
)
from octavo.process import telemetry
from octavo.wire.tls import TlsFiles


@pytest.fixture
def lines():
    """The lines of a program's log, as a person reads them."""
    handler, texts = logging.Handler(), []
    handler.setFormatter(telemetry.HumanFormatter("test"))
    handler.emit = lambda record: texts.append(handler.format(record))
    trail.log.addHandler(handler)
    trail.log.setLevel(logging.INFO)
    yield texts
    trail.log.removeHandler(handler)
    trail.log.setLevel(logging.NOTSET)


def counts(found):
    return {value.labels: value.value for value in found.values() if value.name == "octavo_calls_refused_total"}


def test_floods_are_counted_whole_and_logged_in_part(lines):
    now = 0.0
    found = AccessTrail(ListenerKind.GRPC, clock=lambda: now)
    for _ in range(1000):
        found.note_refusal(ListenerKind.GRPC, AccessReason.UNKNOWN_KEY, Caller("ipv4:10.0.0.7:1", "key:12"), "/x/Y")
    assert counts(found)["grpc", "unknown_key"] == 1000
    assert len(lines) == trail.BURST
    found.note_refusal(ListenerKind.GRPC, AccessReason.NO_KEY, Caller(), "/x/Y")  # another reason is not drowned
    assert len(lines) == trail.BURST + 1
    now = 5.0
    found.note_refusal(ListenerKind.GRPC, AccessReason.UNKNOWN_KEY, Caller("ipv4:10.0.0.7:1", "key:12"), "/x/Y")
    words = ("call refused", "listener=grpc", "reason=unknown_key", "method=/x/Y", "peer=ipv4:10.0.0.7:1", "key:12")
    assert all(word in lines[-1] for word in (*words, f"held_back={1000 - trail.BURST}"))


@given(st.lists(st.floats(0, 100), max_size=200))
def test_lines_keep_the_burst_and_the_rate(gaps):
    limiter, now, logged, held_back = LineLimiter(0.0), 0.0, 0, 0
    for gap in gaps:
        now += gap
        before = limiter.admit(now)
        logged += before is not None
        held_back += before or 0
        assert logged <= trail.BURST + now * trail.LINES_PER_S + 1e-6
    assert logged + held_back <= len(gaps)


@given(st.text())
def test_what_a_peer_says_is_one_short_word(text):
    shown = printable(text)
    assert shown.isascii()
    assert len(shown.split()) <= 1
    assert shown.isprintable() or not shown
    assert len(shown) <= trail.MAX_TEXT


FORGED = "/v1/models  reason=none  peer=10.0.0.1  subject=CN=ann"


def scope_of(**certificate):
    return {"client": ("6.6.6.6", 7), "state": {"peer_certificate": certificate}}


def test_no_peer_can_forge_a_field(lines):
    """Neither by a path, a header, a URI nor a common name, with the two spaces that stand between fields."""
    names = {"subjectAltName": (("URI", FORGED),), "subject": ((("commonName", FORGED),),)}
    caller = Caller.of_request(scope_of(**names))
    AccessTrail(ListenerKind.HTTP).note_refusal(ListenerKind.HTTP, AccessReason.HOST, caller, FORGED, FORGED)
    fields = [word.partition("=")[0] for word in lines[0].split() if "=" in word]
    assert fields == ["listener", "reason", "method", "peer", "subject", "CN", "detail"]
    assert "peer=6.6.6.6:7" in lines[0].split()


@pytest.mark.parametrize(
    ("names", "common", "subject"),
    [
        (
            (("DNS", "a.example"), ("email", "b@c"), ("DirName", ((("commonName", "d"),),))),
            (),
            "name=a.example name=b@c",
        ),
        ((("DNS", "a.example"), ("URI", "u:/r")), (), "u:/r"),
        ((("DNS", "a.example"),), ((("commonName", "ann"),),), "CN=ann"),
        ((), (), ""),
    ],
)
def test_a_certificate_with_any_name_has_a_subject(names, common, subject):
    assert Caller.of_request(scope_of(subjectAltName=names, subject=common)).subject == subject


def test_changes_by_operators_are_always_logged(lines):
    found = AccessTrail(ListenerKind.ADMIN, clock=lambda: 0.0)
    for _ in range(50):
        found.note_admin_call("/octavo.v1.Admin/DrainWorker", Caller("unix:", "CN=ann"), object())
        found.note_admin_call("/octavo.v1.Admin/ListWorkers", Caller("unix:", "CN=ann"), object())
    assert [sum(name in line for line in lines) for name in ("DrainWorker", "ListWorkers")] == [50, trail.BURST]
    calls = {value.labels: value.value for value in found.values() if value.name == "octavo_admin_calls_total"}
    assert calls["Admin/DrainWorker",] == calls["Admin/ListWorkers",] == 50
    assert calls["Admin/Migrate",] == 0


async def test_a_handshake_that_fails_is_counted(certificates, tmp_path_factory):
    """Of a stranger's certificate, and of a client that does not speak TLS."""
    files, found = certificates.files("router"), AccessTrail(ListenerKind.HTTP)
    files.trail = found

    async def app(scope, receive, send):
        raise AssertionError("nobody gets here")

    server = HttpServer(app, "127.0.0.1:0", "--http-listen", files.http_context())
    port = int((await server.start()).rpartition(":")[2])
    strangers = Certificates(tmp_path_factory.mktemp("strangers"))
    context = TlsFiles(ca=certificates.settings("client")["tls_ca"]).client_context()
    own = strangers.settings("client")
    context.load_cert_chain(own["tls_cert"], own["tls_key"])
    try:
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            reader, _ = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
            await reader.readexactly(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
    finally:
        await server.stop(0)
    assert counts(found)["http", "handshake"] == 2
