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
        (types_pb2.FINISH_REASON_LENGTH, ["--max-tokens=4"], "cut at max_tokens=4; --max-tokens raises it"),
        (
            types_pb2.FINISH_REASON_LENGTH,
            [],
            "cut at 4 tokens, the model's own limit or its context; --max-tokens sets another limit",
        ),
        (types_pb2.FINISH_REASON_DEADLINE, ["--deadline=9"], "cut at the deadline; --deadline raises it"),
        (types_pb2.FINISH_REASON_CANCELLED, [], "cut: the request was cancelled"),
    ],
)
@pytest.mark.parametrize("branches", ["1", "2"])
def test_an_answer_that_was_cut_has_a_note(router, endpoint, capsys, reason, flags, note, branches):
    router.finish_reason = reason
    assert main(["generate", "--endpoint", endpoint, "hi", *flags, "--n", branches]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"octavo generate: {note}\n"
    assert ANSWER in captured.out


def test_an_answer_without_text_is_shown(capsys):
    answers.print_notes("chat", [Output(0, "", (), FinishReason.STOP)], {})
    assert capsys.readouterr().err == ""
    answers.print_notes("chat", [Output(0, "", (7, 8), FinishReason.STOP)], {})
    assert capsys.readouterr().err == "octavo chat: the answer has tokens but no text: --json prints the token ids\n"


def test_cut_answers_of_chats_have_a_note(router, endpoint, capsys, monkeypatch):
    router.finish_reason = types_pb2.FINISH_REASON_LENGTH
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["chat", "--endpoint", endpoint, "--max-tokens=4"]) == 0
    assert capsys.readouterr().err == "octavo chat: cut at max_tokens=4; --max-tokens raises it\n"


def test_log_probabilities_are_a_table(router, endpoint, capsys):
    assert main(["generate", "--endpoint", endpoint, "hi", "--logprobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        ANSWER,
        "",
        "id  token  logprob  likeliest",
        " 0  '<0>'  -0.500   '<0>' -0.500, '<1>' -1.250",
        " 1  '<1>'  -0.500   '<1>' -0.500, '<2>' -1.250",
        " 2  '<2>'  -0.500   '<2>' -0.500, '<3>' -1.250",
        " 3  '<3>'  -0.500   '<3>' -0.500, '<4>' -1.250",
    ]


def test_words_that_do_not_come_are_named_one_by_one(router, endpoint, capsys):
    assert main(["generate", "--endpoint", endpoint, "hi", "--bad-words", "oops", "--bad-words", "uh oh"]) == 0
    assert list(router.requests[0].bad_words) == ["oops", "uh oh"]
