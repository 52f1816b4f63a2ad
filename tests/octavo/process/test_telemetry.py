"""Log lines carry their context, are one JSON object each, and never say what an exception says."""

import io
import json
import logging

import pytest

from octavo.process import telemetry

log = logging.getLogger("octavo.test")
SAID = "what an exception says"


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


def test_json_lines_have_their_context(configured):
    stream = configured("json")
    with telemetry.about(request="r1"):
        with telemetry.about(seq="s1", epoch=3):
            log.info("taken by %s", "w1")
        log.info("back")
    log.info("outside")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["taken by w1", "back", "outside"]
    expected = {"request": "r1", "seq": "s1", "epoch": 3, "level": "info", "program": "router"}
    assert lines[0].items() >= expected.items()
    assert lines[1]["request"] == "r1"
    assert "seq" not in lines[1]
    assert "request" not in lines[2]
    assert lines[0]["time"].endswith("Z")


@pytest.mark.parametrize("form", ["human", "json"])
def test_errors_are_found_in_lines_and_have_their_stacks(configured, form):
    stream = configured(form)
    log.warning("slow")
    try:
        raise ValueError(SAID)
    except ValueError:
        log.exception("it broke")
    first, *rest = stream.getvalue().splitlines()
    assert (telemetry.error_in(first), telemetry.error_in(rest[0])) == ("", "it broke")
    assert "builtins.ValueError" in "\n".join(rest)
    assert SAID not in stream.getvalue()
    assert telemetry.error_in('{"no JSON') == ""
