"""pydantic-ai: agents with two tools and a typed output, in its three output modes, and streams."""

from typing import Literal

from cases import BASE, MODEL, TELL, WHO, case, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from typed import Person

provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=BASE, api_key="none", max_retries=9))
chat_model = OpenAIChatModel(MODEL, provider=provider)
EVEN = {"temperature": 0, "max_tokens": 200}


class Remark(BaseModel):
    """What a prompt alone asks for, small models write as they like: any object of JSON is one of these."""

    remark: str = ""


def typed(output, model=chat_model):
    return Agent(model, output_type=output, model_settings=EVEN, retries=3).run_sync(WHO).output.model_dump()


@case
def two_tools():
    """Each tool can be called once; then only the output is left."""
    agent = Agent(chat_model, output_type=ToolOutput(Person), model_settings=EVEN, retries=3)
    called = []

    async def once(context, tool):
        return None if tool.name in [name for name, _ in called] else tool

    @agent.tool_plain(prepare=once)
    def age_of(name: Literal["Ann", "Bob"]) -> int:
        """The age of a person."""
        called.append(["age_of", name])
        return 41

    @agent.tool_plain(prepare=once)
    def mood_of(name: Literal["Ann", "Bob"]) -> str:
        """The mood of a person."""
        called.append(["mood_of", name])
        return "calm"

    output = agent.run_sync("Say the age and the mood of Ann.", usage_limits=UsageLimits(request_limit=6)).output
    return called, output.model_dump()


@case
def stream():
    result = Agent(chat_model, model_settings=EVEN).run_stream_sync(TELL)
    return "".join(result.stream_text(delta=True))


run(
    tool_output=lambda: typed(ToolOutput(Person)),
    native_output=lambda: typed(NativeOutput(Person)),
    prompted_output=lambda: typed(PromptedOutput(Remark)),
    native_output_of_a_response=lambda: typed(NativeOutput(Person), OpenAIResponsesModel(MODEL, provider=provider)),
)
