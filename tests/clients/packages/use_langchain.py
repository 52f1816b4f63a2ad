"""langchain-openai: a chat, a stream, a batch, structured outputs in three methods, tools, vectors, responses."""

from cases import BASE, MODEL, TELL, WHO, case, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import SecretStr
from typed import Person, weather

ROUTER = {"base_url": BASE, "api_key": SecretStr("none"), "model": MODEL, "max_retries": 9}
chat_model = ChatOpenAI(**ROUTER, temperature=0, max_completion_tokens=200)
short = ChatOpenAI(**ROUTER, temperature=0, max_completion_tokens=40)


look = tool(weather)


@case
def invoke():
    answer = short.invoke(TELL)
    return answer.content, answer.usage_metadata["output_tokens"], answer.response_metadata["finish_reason"]


def typed(method):
    return chat_model.with_structured_output(Person, method=method).invoke(WHO).model_dump()


@case
def bind_tools():
    bound = chat_model.bind_tools([look], tool_choice="any", strict=True)
    question = HumanMessage("How is the weather in Rome?")
    called = bound.invoke([question])
    assert called.tool_calls and not called.invalid_tool_calls
    results = [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    return [call["args"] for call in called.tool_calls], short.invoke([question, called, *results]).content


@case
def tool_stream():
    whole = None
    for chunk in chat_model.bind_tools([look], tool_choice="weather").stream("How is the weather in Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls
    return [(call["name"], call["args"]) for call in whole.tool_calls]


@case
def vectors():
    embeddings = OpenAIEmbeddings(**ROUTER, dimensions=8, check_embedding_ctx_length=False)
    return embeddings.embed_documents(["The sea.", "A ship."])


@case
def responses():
    model = ChatOpenAI(**ROUTER, temperature=0, max_completion_tokens=40, use_responses_api=True)
    return model.invoke("Name a sea.").text, "".join(chunk.text for chunk in model.stream("Name a ship."))


run(
    stream=lambda: "".join(chunk.content for chunk in chat_model.stream(TELL)),
    batch=lambda: [answer.content for answer in short.batch(["Name a sea.", "Name a ship.", "Name a wind."])],
    json_schema=lambda: typed("json_schema"),
    function_calling=lambda: typed("function_calling"),
    json_mode=lambda: chat_model.with_structured_output(method="json_mode", schema=None).invoke(WHO),
    completion=lambda: OpenAI(**ROUTER, temperature=0, max_tokens=24).invoke("Once upon a time"),
)
