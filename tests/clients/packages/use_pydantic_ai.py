"""pydantic-ai: agents with two tools and a typed output, in its three output modes, and streams."""

from typing import Literal

from cases import BASE, MODEL, case, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=BASE, api_key="none", max_retries=9))
chat_model = OpenAIChatModel(MODEL, provider=provider)
EVEN = {"temperature": 0, "max_tokens": 200}


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["calm", "merry"]


class Remark(BaseModel):
    """What a prompt alone asks for, small models write as they like: any object of JSON is one of these."""

    remark: str = ""


WHO = "Invent a person with a name, an age and a mood. Answer in JSON."


def typed(output, model=chat_model):
    return Agent(model, output_type=output, model_settings=EVEN, retries=3).run_sync(WHO).output.model_dump()


@case
def tool_output():
    return typed(ToolOutput(Person))


@case
def native_output():
    return typed(NativeOutput(Person))


@case
def prompted_output():
    return typed(PromptedOutput(Remark))


@case
def native_output_of_a_response():
    return typed(NativeOutput(Person), OpenAIResponsesModel(MODEL, provider=provider))


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
    result = Agent(chat_model, model_settings=EVEN).run_stream_sync("Tell me a story of the sea.")
    return "".join(result.stream_text(delta=True))


run()
