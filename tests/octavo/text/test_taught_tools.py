"""Results of tools as users' messages, for templates that know no tools: no picture of one is lost."""

from octavo.text.taught_tools import with_tools

IMAGE = {"type": "image"}


def text(said):
    return {"type": "text", "text": said}


def test_results_keep_their_pictures():
    messages = [("user", "look"), ("assistant", ""), ("tool", ""), ("tool", "so"), ("tool", ""), ("user", "and?")]
    details = [{}, {}, {"content": [text("a"), IMAGE]}, {}, {"content": [IMAGE]}, {}]
    turns, fields = with_tools(messages, [], details)
    assert [role for role, _ in turns] == ["user", "assistant", "user", "user"]
    begin, end = text("<tool_response>\n"), text("\n</tool_response>")
    plain = text("<tool_response>\nso\n</tool_response>")
    assert fields[2] == {"content": [begin, text("a"), IMAGE, end, text("\n"), plain, text("\n"), begin, IMAGE, end]}
    assert [fields[i] for i in (0, 1, 3)] == [{}] * 3
