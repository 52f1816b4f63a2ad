"""Chat messages in every form that callers write, and each wrong one refused by its place."""

import pytest

from octavo.request.chat_messages import is_conversation, message_pairs
from octavo.request.errors import InvalidArgument

TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    "turn", [("user", "Hi"), *({"role": "user", "content": each, "name": None} for each in ("Hi", [TEXT], ["Hi"]))]
)
def test_a_message_has_a_role_and_a_content(turn):
    assert message_pairs([turn], "messages") == [("user", "Hi")]
    assert is_conversation([turn])
    assert message_pairs([{"role": "user", "content": [TEXT, TEXT]}], "messages") == [("user", "Hi\nHi")]


@pytest.mark.parametrize("value", ["Hi", b"Hi", [], [1, 2], [[("user", "Hi")]], None, ["Hi"], [(1, 2)]])
def test_what_is_no_conversation(value):
    assert not is_conversation(value)


IMAGE = {"type": "image_url", "image_url": {"url": "https://…"}}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "user"}, r"m\[1\]: has no content"),
        ({"content": "Hi"}, r"m\[1\]: has no role"),
        ({"role": 3, "content": "Hi"}, r"m\[1\]\.role: a int is no text"),
        ({"role": "user", "content": 3}, r"m\[1\]\.content: a int is neither text nor a list of parts"),
        ({"role": "assistant", "content": None}, r"m\[1\]\.content: a NoneType"),
        ({"role": "assistant", "content": "", "tool_calls": [1]}, r"m\[1\]\.tool_calls: is not supported"),
        ({"role": "user", "content": [TEXT, IMAGE]}, r"m\[1\]\.content\[1\]: a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"m\[1\]\.content\[0\]: a part of type 'text'"),
        ({"role": "user", "content": [3]}, r"m\[1\]\.content\[0\]: a part of type 'int'"),
        ("user: Hi", r"m\[1\]: must be"),
        (("user", "Hi", "there"), r"m\[1\]: must be"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(turn, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        message_pairs([("user", "ok"), turn], "m")
    with pytest.raises(InvalidArgument, match=r"^m: must be a list"):
        message_pairs("Hi", "m")
