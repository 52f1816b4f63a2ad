"""Every error of the tree, as OpenAI's clients see it."""

import pytest

from octavo.request.errors import FieldViolation, InvalidArgument, MessageTooLarge, NotFound, QueueFull, all_classes
from router.http.openai_errors import content_of, headers_of, status_of

TREE = [cls for cls in all_classes() if cls.__module__ == "octavo.request.errors"]


@pytest.mark.parametrize("cls", TREE)
def test_every_error_has_a_status_and_a_shape(cls):
    error = cls.restore("what is wrong")
    assert 400 <= status_of(error) <= 599
    assert set(content_of(error)["error"]) == {"message", "type", "param", "code"}
    assert content_of(error)["error"]["code"] == cls.reason.lower()


@pytest.mark.parametrize("cls", [cls for cls in TREE if cls.retryable])
def test_what_a_retry_helps_has_a_status_that_is_retried(cls):
    assert status_of(cls.restore("")) in (429, 503)


def test_fields_have_the_names_of_the_body():
    error = InvalidArgument(
        "sampling.top_p",
        "is wrong",
        FieldViolation("chat.messages[2].raw_content", "too"),
        FieldViolation("text", "as well"),
    )
    found = content_of(error)["error"]
    assert found["message"] == "top_p: is wrong; messages[2].content: too; prompt: as well"
    assert found["param"] == "top_p"


def test_a_delay_is_told_in_seconds_and_in_milliseconds():
    assert headers_of(QueueFull("full", retry_after_ms=1200)) == [(b"retry-after", b"2"), (b"retry-after-ms", b"1200")]
    assert headers_of(QueueFull("full")) == []


def test_some_errors_have_a_status_of_their_own():
    assert status_of(MessageTooLarge("big")) == 413
    assert content_of(NotFound("no", resource="model", name="x"))["error"]["code"] == "model_not_found"
