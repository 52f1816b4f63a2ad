"""How families of models write calls of tools. A template that teaches a format has its marks."""

from dataclasses import dataclass

from router.tools import call_texts
from router.tools.call_texts import Reader


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begins` stand before the text of some calls and `end` after it; without an end it goes on to the output's end.

    `open_call` and `close_call` stand around the arguments of a call where a call is forced: with `name` in them.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    read: Reader
    marks: tuple[str, ...]  # all of these are in the template
    at_start: bool = False  # nothing may stand before calls
    keeps_begin: bool = False  # the mark is a part of the text of calls
    between: str = ""  # stands between two calls that are forced
    open_call: str = ""
    close_call: str = ""

    @property
    def can_force(self) -> bool:
        return bool(self.open_call)


_JSON_CALL = '{"name": "NAME", "arguments": '
FORMATS = (
    ToolFormat("deepseek", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>", call_texts.separated_calls,
        ("<｜tool▁calls▁begin｜>",)),
    ToolFormat("qwen3_coder", ("<tool_call>",), "</tool_call>", call_texts.xml_calls, ("<tool_call>", "<function=")),
    ToolFormat("glm", ("<tool_call>",), "</tool_call>", call_texts.keyed_calls, ("<tool_call>", "<arg_key>")),
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>", call_texts.json_calls, ("<tool_call>",),
        between="\n", open_call="<tool_call>\n" + _JSON_CALL, close_call="}\n</tool_call>"),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "", call_texts.named_json_calls, ("[TOOL_CALLS]",)),
    ToolFormat("phi4_mini", ("<|tool_call|>",), "<|/tool_call|>", call_texts.json_calls,
        ("<|tool_call|>", "<|/tool_call|>"), open_call="<|tool_call|>[" + _JSON_CALL, close_call="}]<|/tool_call|>"),
    ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "", call_texts.json_calls, ("<|tool_call|>",),
        open_call="<|tool_call|>[" + _JSON_CALL, close_call="}]"),
    ToolFormat("gemma", ("```tool_code",), "```", call_texts.python_calls, ("tool_code",)),
    ToolFormat("llama3_json", ("<|python_tag|>", '{"name":', '{ "name":', '{"name" :'), "", call_texts.json_calls,
        ('"parameters":', "<|start_header_id|>"), at_start=True, keeps_begin=True,
        open_call='{"name": "NAME", "parameters": ', close_call="}"),
    ToolFormat("pythonic", ("[",), "", call_texts.python_calls, ("[func_name1(",), at_start=True, keeps_begin=True),
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
DEFAULT = BY_NAME["hermes"]


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None if it teaches none that is known."""
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)
