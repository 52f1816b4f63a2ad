"""How `octavo generate` takes a prompt, and what it says of an answer."""

import io

import pytest

from octavo.cli import main
from octavo.cli.requests import answers
from octavo.client import Output
from octavo.request.sampling import FinishReason
from octavo.v1 import types_pb2

ANSWER = "Paris, the capital."


@pytest.mark.parametrize("words", [["hi"], ["--prompt", "hi"], ["--prompt=hi"], ["-"], ["--", "hi"]])
def test_prompts_are_arguments_flags_or_stdin(router, endpoint, capsys, monkeypatch, words):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi")))
    assert main(["generate", "--endpoint", endpoint, *words]) == 0
    assert router.requests[0].text == "hi"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (ANSWER + "\n", "")


@pytest.mark.parametrize(
    ("reason", "flags", "note"),
    [
        ("LENGTH", ["--max-tokens=4"], "cut at max_tokens=4; --max-tokens raises it"),
        ("LENGTH", [], "cut at 4 tokens, the model's own limit or its context; --max-tokens sets another limit"),
        ("DEADLINE", ["--deadline=9"], "cut at the deadline; --deadline raises it"),
        ("CANCELLED", [], "cut: the request was cancelled"),
    ],
)
def test_an_answer_that_was_cut_has_a_note(router, endpoint, capsys, monkeypatch, reason, flags, note):
    router.finish_reason = types_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    chats = [] if flags == ["--deadline=9"] else [["chat"]]
    for command, *words in (["generate", "hi", "--n=1"], ["generate", "hi", "--n=2"], *chats):
        assert main([command, *words, "--endpoint", endpoint, *flags]) == 0
        captured = capsys.readouterr()
        assert captured.err == f"octavo {command}: {note}\n"
        assert ANSWER in captured.out


def test_an_answer_without_text_is_shown(capsys):
    answers.print_notes("chat", [Output(0, "", (), FinishReason.STOP)], {})
    assert capsys.readouterr().err == ""
    answers.print_notes("chat", [Output(0, "", (7, 8), FinishReason.STOP)], {})
    assert capsys.readouterr().err == "octavo chat: the answer has tokens but no text: --json prints the token ids\n"


def test_log_probabilities_are_a_table(router, endpoint, capsys):
    words = ["generate", "--endpoint", endpoint, "hi", "--logprobs", "2", "--bad-words", "oops", "--bad-words", "uh oh"]
    assert main(words) == 0
    table = [f" {i}  '<{i}>'  -0.500   '<{i}>' -0.500, '<{i + 1}>' -1.250" for i in range(4)]
    assert capsys.readouterr().out.splitlines() == [ANSWER, "", "id  token  logprob  likeliest", *table]
    assert list(router.requests[0].bad_words) == ["oops", "uh oh"]
