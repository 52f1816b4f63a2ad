import json

import pytest
from effort import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request.errors import InvalidArgument
from octavo.text.chat import ChatTemplate, SpecialTokenGuard, check_messages

TOKENS = ["ab", "bab", "aab", "c", "abca"]  # overlapping, one a single character
TEXT = st.text("abcx ", max_size=12)


def occurrences(text):
    return [start for start in range(len(text)) if any(text.startswith(token, start) for token in TOKENS)]


@settings(max_examples=draws(60, 300))
@given(TEXT, TEXT, TEXT, st.sampled_from(["", " "]))
def test_no_special_token_begins_in_a_disarmed_message(before, content, after, trimmed):
    guard = SpecialTokenGuard(TOKENS)
    disarmed = guard.disarm(content + trimmed)
    for shown in (disarmed, disarmed.strip()):  # templates trim
        start = len(before)
        assert not [at for at in occurrences(before + shown + after) if start <= at < start + len(shown)]
    restored = disarmed
    for char, mark in guard.stand_ins.items():
        restored = restored.replace(mark, char)
    assert restored == content + trimmed


def test_renders_as_published_templates_expect():
    source = (
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ bos_token + message['content'] | trim }}{% endgeneration %}\n"
        "{%- endfor %}{{ {'é': 1} | tojson }}{{ tools is none }}{{ strftime_now('%%') }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([("user", " a "), ("skip", "b")], True) == '<s>a{"é": 1}True%True'
    source = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].tool_calls[0].id }}{{ messages[1].name }}"
    )
    details = [{"tool_calls": [{"id": "c1"}]}, {"name": "ann"}]
    text = ChatTemplate(source, {}).render([("assistant", ""), ("user", "x")], True, [TOOL], details)
    assert text == json.dumps(TOOL) + "c1ann"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_callers_error(source):
    with pytest.raises(InvalidArgument) as caught:
        ChatTemplate(source, {}).render([("user", "hi")], True)
    assert caught.value.field == "chat.messages"


TOOL = {"type": "function", "function": {"name": "weather"}}


def test_templates_without_tools_are_told_of_them_in_messages():
    template = ChatTemplate("{% for each in messages %}{{ each.role }}:{{ each.content }}|{% endfor %}", {})
    call = {"function": {"name": "weather", "arguments": {"where": "Oslo"}}}
    chat = [("user", "x"), ("assistant", "So:"), ("tool", "cold"), ("tool", "dry")]
    text = template.render(chat, True, [TOOL], [{}, {"tool_calls": [call]}, {"tool_call_id": "a"}, {}])
    system, *turns = text.split("|")
    assert system.startswith("system:") and json.dumps(TOOL) in system and "<tool_call>" in system
    assert turns[:2] == [
        "user:x",
        'assistant:So:\n<tool_call>\n{"name": "weather", "arguments": {"where": "Oslo"}}\n</tool_call>',
    ]
    answers = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in ("cold", "dry"))
    assert turns[2:] == [f"user:{answers}", ""]
    assert template.render([("system", "Hi"), ("user", "x")], True, [TOOL]).startswith("system:Hi\n\n")
    assert template.render([("user", "x")], True, (), [{"name": "ann"}]) == "user:x|"


# The parts of published templates that read calls: Mistral's, DeepSeek's, Qwen3's.
OF_MISTRAL = (
    "{% for each in messages %}{% for call in each.tool_calls or [] %}{% if call.id|length != 9 %}"
    "{{ raise_exception('length 9!') }}{% endif %}{{ call.function|tojson }};{{ call.id }};{% endfor %}"
    "{% if each.role == 'tool' %}{% if each.tool_call_id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "{{ each.tool_call_id }};{% endif %}{% endfor %}{{ tools }}"
)
OF_DEEPSEEK = (
    "{% for each in messages %}{% for tool in each['tool_calls'] or [] %}"
    "{{ '```json\n' + tool['function']['arguments'] + '\n```' }}{% endfor %}{% endfor %}{{ tools }}"
)
OF_QWEN = (
    "{% for each in messages %}{% for call in each.tool_calls or [] %}{% if call.function.arguments is string %}"
    "{{ 'text: ' + call.function.arguments }}{% else %}{{ call.function.arguments|tojson }}{% endif %}{% endfor %}"
    "{% endfor %}{% if tools %}{% endif %}"
)
CALL = {"id": "call_" + "0" * 24, "function": {"name": "weather", "arguments": {"where": "Oslo"}}}
CALLED = [{}, {"tool_calls": [CALL]}, {"tool_call_id": CALL["id"]}]
HISTORY = [("user", "x"), ("assistant", ""), ("tool", "cold")]


def test_calls_are_told_as_templates_of_their_families_ask_for():
    told, call_id, result_id, _ = ChatTemplate(OF_MISTRAL, {}).render(HISTORY, True, (), CALLED).split(";")
    assert (told, call_id) == (json.dumps(CALL["function"]), result_id)
    short = [{}, {"tool_calls": [CALL | {"id": "aB3456789"}]}, {"tool_call_id": "aB3456789"}]
    assert ChatTemplate(OF_MISTRAL, {}).render(HISTORY, True, (), short).count("aB3456789;") == 2
    arguments = ChatTemplate(OF_DEEPSEEK, {}).render(HISTORY, True, (), CALLED)
    assert arguments.startswith('```json\n{"where": "Oslo"}\n```')
    assert ChatTemplate(OF_QWEN, {}).render(HISTORY, True, (), CALLED) == '{"where": "Oslo"}'


def test_a_template_that_reads_tools_of_a_message_has_them_there():
    """That of Phi-4-mini, as it is published."""
    source = (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is "
        "not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + "
        "'<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    )
    template = ChatTemplate(source, {})
    text = template.render([("system", "Be brief."), *HISTORY], True, [TOOL], [{}, *CALLED])
    assert text == (
        '<|system|>Be brief.<|tool|>[{"name": "weather"}]<|/tool|><|end|><|user|>x<|end|>'
        '<|assistant|><|tool_call|>[{"name": "weather", "arguments": {"where": "Oslo"}}]<|/tool_call|><|end|>'
        "<|tool_response|>cold<|end|><|assistant|>"
    )
    assert template.takes_tools
    assert '<|tool|>[{"name": "weather"}]<|/tool|>' in template.render([("user", "x")], True, [TOOL])
    assert template.render([("user", "x")], True) == "<|user|>x<|end|><|assistant|>"


@pytest.mark.parametrize("role", ["", "a b", "user|>", "<|x|>", "user\n", "é", "x" * 65])
def test_a_role_is_a_name(role):
    with pytest.raises(InvalidArgument, match="role"):
        check_messages([("user", "hi"), (role, "hi")])


def test_no_special_token_is_left_in_tools():
    guard = SpecialTokenGuard(["<|end|>"])
    chat = (["hi"], [{"description": "a<|end|>b", "<|end|>": {"deep": ["<|end|>", 7, None]}}])
    disarmed = guard.disarm_all(chat)
    assert "<|end|>" not in repr(disarmed)
    assert disarmed[0] == ["hi"]
    assert guard.disarm_all((["hi"], [TOOL])) == (["hi"], [TOOL])
    with pytest.raises(InvalidArgument):
        guard.disarm_all((["<|end|>"], [{"description": next(iter(guard.stand_ins.values()))}]))


PARTS_ALONE = (
    "{% for m in messages %}{{ m['role'] }}:{% for line in m['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% else %}<image>{% endif %}{% endfor %}|{% endfor %}"
)
EITHER = "{% for m in messages %}{{ m['content'] if m['content'] is string else 'type' }}{% endfor %}"


@pytest.mark.parametrize(("source", "shown"), [(PARTS_ALONE, "user:one|assistant:two|"), (EITHER, "onetwo")])
def test_a_template_that_shows_parts_alone_gets_each_text_as_a_part(source, shown):
    """Those of SmolVLM and LLaVA show nothing of a plain text."""
    template = ChatTemplate(source, {})
    assert template.render([("user", "one"), ("assistant", "two")], add_generation_prompt=False) == shown
    details = [{"content": [{"type": "image"}, {"type": "text", "text": "seen"}]}, {}]
    if source == PARTS_ALONE:
        told = template.render([("user", ""), ("assistant", "two")], add_generation_prompt=False, details=details)
        assert told == "user:<image>seen|assistant:two|"
