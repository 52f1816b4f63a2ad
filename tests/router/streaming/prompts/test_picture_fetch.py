"""Pictures come from listed hosts at public addresses, without redirects, and no larger than allowed."""

import http.server
import socket
import threading
from contextlib import contextmanager

import pytest

from octavo.request.errors import InvalidArgument, Unreachable
from router.streaming.prompts import picture_fetch
from router.streaming.prompts.picture_fetch import checked_url, fetch_picture, is_public

HOSTS = ("https://images.example.com", "http://pictures.example.com:8080")


WITHIN = """127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255
    192.0.2.1 ::1 fe80::1%eth0 fd00::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1:: ff02::1 ::"""


def test_public_addresses_are_known():
    assert all(map(is_public, ("8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808")))
    assert not [address for address in WITHIN.split() if is_public(address)]


FOREIGN = [
    *("https://example.com/a.png", "http://images.example.com/a.png", "https://images.example.com:8443/a"),
    *("https://images.example.com.evil.com/a", "https://images.example.com@evil.com/a", "https://evil.com#"),
    *("https://name:secret@images.example.com/a", "file:///etc/passwd", "ftp://images.example.com/a", "//x/y"),
    *("https://images.example.com\\@evil.com/", "https://images.example.com/a\r\nHost: evil.com", "gopher://x"),
    *("https://[::1]/a", "https://images.example.com:99999/", "https://images.example.com/ä", "", "x" * 5000),
]


def test_listed_hosts_alone_are_taken():
    assert checked_url("https://IMAGES.example.com:443/a?b=c", "f", HOSTS).hostname == "images.example.com"
    assert checked_url("http://pictures.example.com:8080/a", "f", HOSTS).port == 8080
    for url in FOREIGN:
        with pytest.raises(InvalidArgument) as refused:
            checked_url(url, "field", HOSTS)
        assert refused.value.field == "field", url


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    asked: list[str] = []  # noqa: RUF012  of one test

    def do_GET(self):
        self.asked.append(f"{self.headers['Host']} {self.path}")
        status, body = {"/ok?a=b": (200, b"picture"), "/large": (200, bytes(5000)), "/gone": (404, b"")}.get(
            self.path, (302, b"")
        )
        self.send_response(503 if self.path == "/busy" else status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1/secret")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def answering():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def site(monkeypatch):
    """A listed host, whose name leads to this machine and whose address passes as public."""
    Answers.asked.clear()
    with answering() as port:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr(picture_fetch, "is_public", lambda _: True)
        yield f"http://pictures.example.com:{port}"


def test_a_picture_is_fetched_once_and_whole(site):
    assert fetch_picture(f"{site}/ok?a=b", "f", (site,), 100) == b"picture"
    assert Answers.asked == [f"{site.removeprefix('http://')} /ok?a=b"]
    for path, error, what in (
        ("/elsewhere", InvalidArgument, "not followed"),
        ("/large", InvalidArgument, "more than 100 bytes"),
        ("/gone", InvalidArgument, "anybody may read"),
        ("/busy", Unreachable, "retry"),
    ):
        with pytest.raises(error, match=what):
            fetch_picture(f"{site}{path}", "f", (site,), 100)
    assert len(Answers.asked) == 5


def test_a_name_of_an_address_within_is_refused(monkeypatch):
    """Nothing is sent there, also where another address of the name is public."""
    with answering() as port:
        Answers.asked.clear()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("8.8.8.8", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        site = f"http://pictures.example.com:{port}"
        with pytest.raises(InvalidArgument, match="no public address"):
            fetch_picture(f"{site}/ok?a=b", "f", (site,), 9)
        assert not Answers.asked
