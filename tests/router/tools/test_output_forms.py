"""Which formats are looked for: by the settings of a router, and by the templates of models."""

from octavo.settings import router as settings
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer
from router.tools import formats, reasoning
from router.tools.asked_tools import AskedTools
from router.tools.output_forms import OutputForms


def tokenizer_with(template):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = tokenizer.template_with_tools = template
    return tokenizer


def test_settings_know_all_formats():
    assert sorted(settings.TOOL_PARSERS) == sorted(["auto", "none", *formats.BY_NAME])
    assert sorted(settings.REASONING_PARSERS) == sorted(["auto", "none", *reasoning.BY_NAME])


TEMPLATES = {
    "{{ tools }}<tool_call>{% if enable_thinking %}<think></think>": ("hermes", "think"),
    "<tool_call><function=": ("qwen3_coder", "none"),
    "<|start|>assistant<|channel|>commentary<|message|><|call|>": ("harmony", "harmony"),
    "[TOOL_CALLS]x[ARGS] [THINK] [/THINK]": ("mistral_args", "mistral"),
    "<｜tool▁calls▁begin｜>function\n```json </think>": ("deepseek", "think"),
    "<｜tool▁calls▁begin｜></think>": ("deepseek_v31", "think"),
    "{{ message['tools'] }}<|/tool|>": ("phi4_mini", "none"),
    "as functools[{'name': ...}]": ("functools", "none"),
    "{{ tools }}": ("none", "none"),
    "": ("hermes", "none"),  # taught in a system message of ours
}


def test_templates_say_their_formats():
    for template, names in TEMPLATES.items():
        assert OutputForms().names_of(tokenizer_with(template)) == names


def test_settings_go_before_templates():
    tokenizer = tokenizer_with("<tool_call></think>")
    assert OutputForms("glm", "none").names_of(tokenizer) == ("glm", "none")
    assert OutputForms("none", "kimi").names_of(tokenizer) == ("none", "kimi")
    assert OutputForms("glm", "none").division(tokenizer, None) is None
    division = OutputForms("glm", "none").division(tokenizer, AskedTools({}))
    assert (division.form.name, division.reasoning) == ("glm", None)


def test_a_prompt_says_whether_reasoning_has_begun():
    tokenizer, division = ByteTokenizer(), OutputForms().division(tokenizer_with("</think>"), None)
    for prompt, inside in (("<think>\n", True), ("<think>\n\n</think>\n", False), ("assistant\n", False)):
        division.note_prompt(tokenizer, tokenizer.encode("user\n" + prompt)[-16:])
        assert division.begins_inside == inside
