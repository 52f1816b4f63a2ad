"""How families of models write calls of tools. A template that teaches a format has its marks."""

import re
from dataclasses import dataclass
from functools import lru_cache

from router.tools.sections import call_texts
from router.tools.sections.call_texts import Reader, Schemas
from router.tools.sections.json_section import ARGUMENTS, JsonSection, JsonShape
from router.tools.sections.whole_section import WholeSection


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`begins` stand before the text of some calls and `end` after it; without an end it goes on to the output's end.

    `body` says what stands between them: a shape of JSON, or a function that reads it when it is whole. `open_call` and
    `close_call` stand around the arguments of a call where a call is forced: with `NAME` in them.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    body: JsonShape | Reader
    marks: tuple[str, ...]  # all of these are in the template
    absent: tuple[str, ...] = ()  # none of these is
    at_start: bool = False  # nothing may stand before calls
    kept: tuple[str, ...] = ()  # of `begins`, those that are a part of the text of calls
    between: str = ""  # stands between two calls that are forced
    open_call: str = ""
    close_call: str = ""
    open_argument: str = ""  # where each argument stands between marks of its own: with `KEY` in them
    close_argument: str = ""
    no_text: tuple[str, ...] = ()  # which no text between these marks may have
    open_all: str = ""  # stand around all calls that are forced, where these are not each between marks of its own
    close_all: str = ""
    in_python: bool = False  # arguments are Python's: key=value
    binds_strict: bool = True  # if calls can be forced: they can also be bound where they stand among other text

    @property
    def can_force(self) -> bool:
        return bool(self.open_call)

    def keeps(self, mark: str) -> bool:
        return mark in self.kept

    def section(self, schemas: Schemas) -> JsonSection | WholeSection:
        """A reader of what stands between the marks."""
        if isinstance(self.body, JsonShape):
            return JsonSection(self.body, self.end, schemas if self.at_start and schemas else None)
        return WholeSection(self.body, schemas, self.end, skips_texts=self.in_python)

    def is_taught_by(self, template: str) -> bool:
        has_marks = all(mark in template for mark in self.marks)
        return has_marks and not any(mark in template for mark in self.absent)


_JSON = JsonShape()
_NAME = r"(?P<name>[^\s<>{}\[\]]{1,128})"
_MISTRAL = JsonShape(
    ("[TOOL_CALLS]", "[", "]", ",", ";"),
    (re.compile(_NAME + r"\s{0,16}(?:\[CALL_ID\][^\[{]{0,64})?\[ARGS\]\s{0,16}" + ARGUMENTS),),
)
_BEGIN, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK = JsonShape(
    ("<｜tool▁call▁end｜>", "```"),
    (
        re.compile(rf"{_BEGIN}\s{{0,16}}function{_SEPARATOR}{_NAME}\s{{0,16}}```(?:json)?\s{{0,16}}{ARGUMENTS}"),
        re.compile(rf"{_BEGIN}\s{{0,16}}{_NAME}\s{{0,16}}{_SEPARATOR}\s{{0,16}}{ARGUMENTS}"),
    ),
    has_objects=False,
)
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_JSON_CALL = '{"name": "NAME", "arguments": '
_NAMED = ('{"name":', '{ "name":', '{"name" :')
FORMATS = (
    ToolFormat("harmony", ("<|channel|>", "<|message|>"), "<|end|>", _JSON, ("<|channel|>", "<|message|>", "<|call|>"),
        open_call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", binds_strict=False),
    ToolFormat("deepseek", (_CALLS,), _CALLS_END, _DEEPSEEK, (_CALLS, "```json"),
        open_call=f"{_CALLS}{_BEGIN}function{_SEPARATOR}NAME\n```json\n",
        close_call=f"\n```<｜tool▁call▁end｜>{_CALLS_END}"),
    ToolFormat("deepseek_v31", (_CALLS,), _CALLS_END, _DEEPSEEK, (_CALLS,),
        open_call=f"{_CALLS}{_BEGIN}NAME{_SEPARATOR}", close_call=f"<｜tool▁call▁end｜>{_CALLS_END}"),
    ToolFormat("qwen3_coder", ("<tool_call>",), "</tool_call>", call_texts.xml_calls, ("<tool_call>", "<function="),
        between="\n", open_call="<tool_call>\n<function=NAME>\n", close_call="</function>\n</tool_call>",
        open_argument="<parameter=KEY>\n", close_argument="\n</parameter>\n",
        no_text=("</tool_call>", "</function>", "<parameter="), binds_strict=False),
    ToolFormat("glm", ("<tool_call>",), "</tool_call>", call_texts.keyed_calls, ("<tool_call>", "<arg_key>"),
        between="\n", open_call="<tool_call>NAME\n", close_call="</tool_call>",
        open_argument="<arg_key>KEY</arg_key>\n<arg_value>", close_argument="</arg_value>\n",
        no_text=("</tool_call>",), binds_strict=False),
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>", _JSON, ("<tool_call>",), absent=("<|tool_call|>",),
        between="\n", open_call="<tool_call>\n" + _JSON_CALL, close_call="}\n</tool_call>"),
    ToolFormat("mistral_args", ("[TOOL_CALLS]",), "", _MISTRAL, ("[TOOL_CALLS]", "[ARGS]"),
        open_call="[TOOL_CALLS]NAME[ARGS]"),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "", _MISTRAL, ("[TOOL_CALLS]",),
        open_call="[TOOL_CALLS][" + _JSON_CALL, close_call="}]"),
    ToolFormat("phi4_mini", ("<|tool_call|>",), "<|/tool_call|>", _JSON,
        ("<|/tool|>",), open_call="<|tool_call|>[" + _JSON_CALL, close_call="}]<|/tool_call|>"),
    ToolFormat("functools", ("functools[",), "", _JSON, ("functools[",),
        open_call="functools[" + _JSON_CALL, close_call="}]"),
    ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "", _JSON, ("<|tool_call|>",),
        open_call="<|tool_call|>[" + _JSON_CALL, close_call="}]"),
    ToolFormat("gemma", ("```tool_code",), "```", call_texts.python_calls, ("tool_code",),
        between="\n", open_call="```tool_code\nNAME(", close_call=")\n```", in_python=True),
    ToolFormat("gemma4", ("<|tool_call>",), "<tool_call|>", call_texts.braced_calls, ("<|tool_call>",)),
    ToolFormat("functiongemma", ("<start_function_call>",), "<end_function_call>", call_texts.braced_calls,
        ("<start_function_call>",)),
    ToolFormat("llama3_json", ("<|python_tag|>", *_NAMED), "", _JSON, ('"parameters":', "<|start_header_id|>"),
        at_start=True, kept=_NAMED, open_call='{"name": "NAME", "parameters": ', close_call="}"),
    ToolFormat("pythonic", ("[",), "", call_texts.python_calls, ("[func_name1(",), at_start=True, kept=("[",),
        between=", ", open_call="NAME(", close_call=")", open_all="[", close_all="]", in_python=True),
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
DEFAULT = BY_NAME["hermes"]


@lru_cache(maxsize=64)
def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None if it teaches none that is known."""
    return next((each for each in FORMATS if each.is_taught_by(template)), None)
