"""`octavo embed` and `octavo score`: what they ask of a router, and what they print."""

import io
import json

from octavo.cli import main
from octavo.v1 import inference_pb2


def test_vectors_of_texts_and_of_lines_are_one_object(router, endpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nthree\n"))
    flags = ["--dimensions", "2", "--pooling", "mean", "--no-normalize", "--model", "m"]
    assert main(["embed", "--endpoint", endpoint, "one", "-", *flags]) == 0
    [asked] = router.requests
    assert [each.text for each in asked.inputs] == ["one", "two", "three"]
    assert (asked.dimensions, asked.pooling, asked.normalize) == (2, inference_pb2.POOLING_MEAN, False)
    told = json.loads(capsys.readouterr().out)
    assert told == {"model": "m", "vectors": [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]], "prompt_tokens": 7}


def test_scores_are_one_object(router, endpoint, capsys):
    words = ["score", "--endpoint", endpoint, "What?", "a", "b", "--method", "qwen3", "--instruction", "Find it"]
    assert main(words) == 0
    [asked] = router.requests
    assert (list(asked.left), list(asked.right)) == (["What?"], ["a", "b"])
    assert (asked.method, asked.instruction) == ("qwen3", "Find it")
    assert json.loads(capsys.readouterr().out)["scores"] == [0.25, 0.25]


def test_an_empty_stdin_is_refused(endpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["embed", "--endpoint", endpoint, "-"]) == 2
    assert capsys.readouterr().err == "octavo embed: inputs: stdin has no line: give at least one text\n"
