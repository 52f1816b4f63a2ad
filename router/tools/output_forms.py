"""In which formats models write calls and reasoning: as a router's settings say, or as the templates of models show."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.text.tokenizers.tokenizer import AnyTokenizer
from router.tools import reasoning
from router.tools.asked_tools import AskedTools, tool_format
from router.tools.formats import ToolFormat
from router.tools.reasoning import ReasoningFormat, last_text, reasoning_of
from router.tools.tool_message import ToolMessage

AUTO, NONE = "auto", "none"


@dataclass(slots=True)
class Division:
    """What is looked for in the outputs of one request."""

    tools: AskedTools | None  # None: no calls
    form: ToolFormat | None
    reasoning: ReasoningFormat | None
    shows_reasoning: bool = True
    begins_inside: bool = False  # the prompt ends where reasoning begins

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that the output must show if they are special tokens."""
        calls = (*self.form.begins, self.form.end) if self.form is not None and self.tools is not None else ()
        return calls if self.reasoning is None else (*calls, self.reasoning.begin, self.reasoning.end)

    def message(self, request_id: str, branch: int) -> ToolMessage:
        """The message of a branch, of which nothing has come yet."""
        return ToolMessage(
            self.tools,
            self.form,
            request_id,
            branch,
            self.reasoning,
            begins_inside=self.begins_inside,
            shows_reasoning=self.shows_reasoning,
        )

    def note_prompt(self, tokenizer: AnyTokenizer, prompt_end: Sequence[int]) -> None:
        """Looks at the last tokens of the prompt: the output may begin inside of the reasoning."""
        if self.reasoning is not None:
            self.begins_inside = self.reasoning.is_begun(last_text(tokenizer, prompt_end))


@dataclass(frozen=True, slots=True)
class OutputForms:
    """What the settings say: names of formats, or auto."""

    tool_parser: str = AUTO
    reasoning_parser: str = AUTO

    def tools_of(self, tokenizer: AnyTokenizer) -> ToolFormat | None:
        if self.tool_parser == NONE:
            return None
        return tool_format(tokenizer, "" if self.tool_parser == AUTO else self.tool_parser)

    def reasoning_of(self, tokenizer: AnyTokenizer) -> ReasoningFormat | None:
        if self.reasoning_parser == AUTO:
            return reasoning_of(getattr(tokenizer, "chat_template", ""))
        return reasoning.BY_NAME.get(self.reasoning_parser)

    def names_of(self, tokenizer: AnyTokenizer) -> tuple[str, str]:
        """The names of the two formats, for people: none where a model has none that is known."""
        tools, thinks = self.tools_of(tokenizer), self.reasoning_of(tokenizer)
        return tools.name if tools is not None else NONE, thinks.name if thinks is not None else NONE

    def division(
        self, tokenizer: AnyTokenizer, tools: AskedTools | None, *, shows_reasoning: bool = True
    ) -> Division | None:
        """What is looked for in the outputs of a chat; None: they are content and nothing else."""
        thinks = self.reasoning_of(tokenizer)
        if tools is None and thinks is None:
            return None
        return Division(tools, self.tools_of(tokenizer), thinks, shows_reasoning)
