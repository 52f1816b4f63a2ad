"""Log lines carry their context, are one JSON object each, and never say what an exception says."""

import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest

from octavo.local.development_ca import make_certificates
from octavo.process import telemetry

CANARY = "xyzzy-canary"
log = logging.getLogger("octavo.test")


@pytest.fixture
def configured():
    """Puts the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def configure(form, level="info"):
        stream = io.StringIO()
        telemetry.configure("router", form=form, level=level, stream=stream)
        return stream

    yield configure
    root.handlers[:], root.level = handlers, level
    for name in telemetry.QUIET:
        logging.getLogger(name).setLevel(logging.NOTSET)


def fail():
    try:
        {}[CANARY]
    except KeyError as error:
        raise ValueError(f"prompt was {CANARY}") from error


def test_json_lines_have_the_context_they_were_logged_in(configured):
    stream = configured("json")
    with telemetry.about(request="r1"):
        with telemetry.about(seq="s1", epoch=3):
            log.info("taken by %s", "w1")
        log.info("back")
    log.info("outside")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["taken by w1", "back", "outside"]
    assert {**lines[0]}.items() >= {
        "request": "r1",
        "seq": "s1",
        "epoch": 3,
        "level": "info",
        "program": "router",
    }.items()
    assert lines[1]["request"] == "r1"
    assert "seq" not in lines[1]
    assert "request" not in lines[2]
    assert lines[0]["time"].endswith("Z")


def test_human_lines_have_it_too(configured):
    stream = configured("human")
    with telemetry.about(seq="s1", epoch=3):
        log.warning("fenced")
    assert "router warning fenced  seq=s1  epoch=3" in stream.getvalue()


@pytest.mark.parametrize("form", telemetry.FORMATS)
def test_a_stack_says_where_but_not_what(form, configured):
    stream = configured(form)
    try:
        fail()
    except ValueError:
        log.exception("step failed")
    text = stream.getvalue()
    assert "step failed" in text
    assert "in fail" in text
    assert "KeyError" in text
    assert "ValueError" in text
    assert CANARY not in text


@pytest.mark.parametrize("level", telemetry.LEVELS)
def test_levels(level, configured):
    stream = configured("json", level)
    for name in telemetry.LEVELS:
        log.log(getattr(logging, name.upper()), name)
    seen = [json.loads(line)["level"] for line in stream.getvalue().splitlines()]
    assert seen == list(telemetry.LEVELS[telemetry.LEVELS.index(level) :])


def test_grpc_tells_no_call_at_level_debug(configured):
    noisy = logging.getLogger("grpc._cython.cygrpc")
    stream = configured("human", "debug")
    noisy.debug("[_cygrpc] Loaded running loop")
    log.debug("ours")
    noisy.warning("theirs")
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["ours", "theirs"]
    configured("human", "error")
    noisy.warning("theirs")
    assert not noisy.isEnabledFor(logging.WARNING)


async def test_tasks_do_not_see_each_others_context(configured):
    stream = configured("json")

    async def work(name):
        with telemetry.about(seq=name):
            await asyncio.sleep(0.01)
            log.info(name)

    await asyncio.gather(*(work(f"s{i}") for i in range(5)))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 5
    assert all(line["seq"] == line["message"] for line in lines)


HANDSHAKE = """
import asyncio, socket, sys
from octavo.process import telemetry
telemetry.configure("router", form="json")
import grpc
async def main():
    server = grpc.aio.server()
    pair = [open(name, "rb").read() for name in sys.argv[1:]]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tuple(pair)]))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"no handshake of TLS" * 20)
    await reader.read()
    await server.stop(0)
asyncio.run(main())
"""


def test_a_stranger_makes_grpc_write_no_line_of_its_own(tmp_path):
    """Such a line is no JSON, and as many come as there are strangers."""
    make_certificates(tmp_path)
    pair = [tmp_path / "router.key", tmp_path / "router.crt"]
    done = subprocess.run([sys.executable, "-c", HANDSHAKE, *pair], check=True, capture_output=True, text=True)
    assert done.stderr == ""
