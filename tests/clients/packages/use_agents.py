"""openai-agents: an agent with two tools, run after run, and one with a typed output, on chats and on responses."""

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import BASE, MODEL, run
from openai import AsyncOpenAI
from typed import Person

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=9)
chat_model = OpenAIChatCompletionsModel(MODEL, openai_client=client)
responses_model = OpenAIResponsesModel(MODEL, openai_client=client)


called: list[list[str]] = []


@function_tool
def age_of(name: Literal["Ann", "Bob"]) -> int:
    """The age of a person."""
    called.append(["age_of", name])
    return 41


@function_tool
def mood_of(name: Literal["Ann", "Bob"]) -> str:
    """The mood of a person."""
    called.append(["mood_of", name])
    return "calm"


def talk(model):
    """One tool after the other, then a typed output: three agents, each with the history of those before it."""
    called.clear()
    history = [{"role": "user", "content": "Say the age and the mood of Ann as JSON."}]
    for tool in (age_of, mood_of):
        settings = ModelSettings(temperature=0, max_tokens=60, tool_choice=tool.name, parallel_tool_calls=False)
        agent = Agent(
            name="A",
            model=model,
            tools=[age_of, mood_of],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        history = Runner.run_sync(agent, history).to_input_list()
    agent = Agent(
        name="B", model=model, output_type=Person, model_settings=ModelSettings(temperature=0, max_tokens=100)
    )
    output = Runner.run_sync(agent, history).final_output
    assert [name for name, _ in called] == ["age_of", "mood_of"]
    return [list(call) for call in called], output.model_dump()


run(
    agent_of_chats=lambda: talk(chat_model),
    agent_of_responses=lambda: talk(responses_model),
)
