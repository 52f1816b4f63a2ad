"""Haystack: generators in a pipeline, a stream, tools and an agent of theirs, a schema, responses, vectors."""

from cases import BASE, MODEL, TELL, WHO, case, run
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from typed import Person, weather

ROUTER = {
    "api_base_url": BASE,
    "api_key": Secret.from_token("none"),
    "model": MODEL,
    "max_retries": 9,
    "timeout": 600.0,
}


def generator(max_tokens=60, **options):
    more = options.pop("generation_kwargs", {})
    return OpenAIChatGenerator(
        **ROUTER, **options, generation_kwargs={"temperature": 0, "max_completion_tokens": max_tokens, **more}
    )


@case
def pipeline():
    made = Pipeline()
    made.add_component(
        "prompt", ChatPromptBuilder([ChatMessage.from_user("Tell me of the {{ what }}.")], required_variables="*")
    )
    made.add_component("model", generator())
    made.connect("prompt", "model")
    return made.run({"prompt": {"what": "sea"}})["model"]["replies"][0].text


@case
def stream():
    parts = []
    whole = generator(streaming_callback=lambda chunk: parts.append(chunk.content)).run([ChatMessage.from_user(TELL)])
    assert "".join(parts) == whole["replies"][0].text
    return "".join(parts)


@case
def schema():
    asked = ChatMessage.from_user(WHO)
    reply = generator(200, generation_kwargs={"response_format": Person}).run([asked])["replies"][0]
    return Person.model_validate_json(reply.text).model_dump()


@case
def tools():
    made = generator(
        tools=[create_tool_from_function(weather)], tools_strict=False, generation_kwargs={"tool_choice": "required"}
    )
    calls = made.run([ChatMessage.from_user("How is the weather in Oslo?")])["replies"][0].tool_calls
    assert calls
    return [(call.tool_name, call.arguments["city"]) for call in calls]


@case
def responses():
    made = OpenAIResponsesChatGenerator(**ROUTER, generation_kwargs={"temperature": 0, "max_output_tokens": 40})
    return made.run([ChatMessage.from_user(TELL)])["replies"][0].text


@case
def vectors():
    documents = OpenAIDocumentEmbedder(**ROUTER, dimensions=8, progress_bar=False).run([Document(content="The sea.")])
    return OpenAITextEmbedder(**ROUTER, dimensions=8).run("A ship.")["embedding"], documents["documents"][0].embedding


run()
