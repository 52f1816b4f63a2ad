"""LlamaIndex: its LLM and its vectors for servers like OpenAI's; chats, completions, streams, tools, typed outputs."""

from cases import BASE, MODEL, TELL, WHO, case, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from typed import Person, weather

ROUTER = {"api_base": BASE, "api_key": "none", "max_retries": 9, "timeout": 600}
LLM = {**ROUTER, "model": MODEL, "temperature": 0, "context_window": 2048}
chat_model = OpenAILike(**LLM, max_tokens=100, is_chat_model=True, is_function_calling_model=True)
text_model = OpenAILike(**LLM, max_tokens=32)
typed_model = OpenAILike(**LLM, max_tokens=200, is_chat_model=True, should_use_structured_outputs=True)
STORY = [ChatMessage(role="user", content=TELL)]


@case
def typed_output():
    prompt = ChatMessage(role="user", content=WHO)
    return typed_model.as_structured_llm(Person).chat([prompt]).raw.model_dump()


@case
def tools():
    tool = FunctionTool.from_defaults(weather)
    answer = chat_model.chat_with_tools([tool], user_msg="How is the weather in Rome?", tool_required=True)
    calls = chat_model.get_tool_calls_from_response(answer)
    return [(call.tool_name, call.tool_kwargs["city"]) for call in calls]


@case
def vectors():
    model = OpenAILikeEmbedding(model_name=MODEL, dimensions=8, **ROUTER)
    return model.get_text_embedding_batch(["The sea.", "A ship."]), model.get_query_embedding("sea")


run(
    chat=lambda: chat_model.chat(STORY).message.content,
    stream=lambda: "".join(part.delta or "" for part in chat_model.stream_chat(STORY)),
    completion=lambda: text_model.complete("Once upon a time").text,
    completion_stream=lambda: "".join(part.delta or "" for part in text_model.stream_complete("Once upon a time")),
)
