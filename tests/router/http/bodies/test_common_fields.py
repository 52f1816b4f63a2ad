"""Fields of both endpoints that vLLM has, against routers and workers in this process."""

import pytest

from octavo.v1 import inference_pb2
from router.http.bodies.completion_body import read_completion

PROMPT = list(range(3, 40))
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
PATH = "/v1/completions"


async def test_log_probabilities_of_prompts_have_the_shape_of_vllm(post):
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    choices = (await post(PATH, body)).object["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *rest = choices[0]["prompt_logprobs"]
    assert first is None
    for char, entries in zip("nce", rest, strict=True):
        assert entries[str(ord(char))]["decoded_token"] == char
    plain = (await post(PATH, {**body, "prompt_logprobs": None})).object
    assert "prompt_logprobs" not in plain["choices"][0]
    other = await post(PATH, {**body, "n": 1, "logprobs": 1, "echo": True})
    assert (other.status, other.error["param"]) == (400, "prompt_logprobs")


def test_a_priority_may_be_a_number():
    named = (
        (0, "DEFAULT"),
        (-7, "INTERACTIVE"),
        (3.0, "BULK"),
        (2**63, "BULK"),
        ("system", "SYSTEM"),
        ("bulk", "BULK"),
    )
    for value, name in named:
        request = read_completion({"prompt": "x", "priority": value}).request
        assert request.priority == inference_pb2.Priority.Value(f"PRIORITY_{name}")


async def test_every_answer_repeats_the_name_that_a_client_gives(call, post):
    first, second = [await post(PATH, GREEDY, x_request_id="trace-7") for _ in range(2)]
    assert first.object["id"] != second.object["id"]
    assert first.headers["x-octavo-request-id"] == first.object["id"]
    unfit = await post(PATH, GREEDY, x_request_id="x" * 129)
    assert unfit.headers["x-request-id"] == unfit.object["id"]
    for method, path, body, status in (
        ("POST", PATH, GREEDY, 200),
        ("POST", PATH, {}, 400),
        ("POST", "/v1/embeddings", {"input": "x"}, 200),
        ("POST", "/rerank", {"query": "q", "documents": ["a"]}, 200),
        ("POST", "/score", {}, 400),
        ("POST", "/tokenize", {"prompt": "x"}, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", f"/v1/requests/{first.object['id']}", None, 200),
        ("GET", "/v1/requests/never", None, 404),
        ("GET", "/version", None, 200),
        ("POST", "/v1/load_lora_adapter", {}, 403),
        ("POST", "/nothing", {}, 404),
        ("GET", PATH, None, 405),
    ):
        answer = await call(method, path, body, x_request_id="trace-9")
        assert (answer.status, answer.headers["x-request-id"]) == (status, "trace-9"), path
        assert answer.headers.get("x-octavo-request-id", "") != "trace-9"


async def test_a_budget_for_thinking_needs_a_model_that_thinks(post):
    for name in ("thinking_budget", "thinking_token_budget"):
        refused = await post(PATH, {**GREEDY, name: 3})
        assert (refused.status, refused.error["param"]) == (400, "thinking_budget")
        assert (await post(PATH, {**GREEDY, name: 3, "thinking_end_ids": [7]})).status == 200


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 1, "seed": 5, "max_tokens": 6, "n": 2}
COMPLETION = {"prompt": PROMPT, "temperature": 1, "seed": 5, "max_tokens": 6, "n": 2}


def in_choices(answer):
    return [choice.get("prompt_token_ids") for choice in answer["choices"]]


async def test_token_ids_of_the_prompt_are_shown_once(templates, post):
    """In each choice of a completion, beside the choices of a chat; in a stream, in the first chunk of these."""
    body = {**COMPLETION, "return_token_ids": True, "truncate_prompt_tokens": 7}
    assert in_choices((await post(PATH, {**body, "truncation_side": "left"})).object) == [PROMPT[-7:]] * 2
    assert in_choices((await post(PATH, {**body, "truncation_side": "right"})).object) == [PROMPT[:7]] * 2
    chunks = (await post(PATH, {**body, "stream": True})).chunks
    for index in range(2):
        shown = [ids for chunk in chunks for ids in in_choices(chunk) if chunk["choices"][0]["index"] == index]
        assert shown == [PROMPT[-7:]] + [None] * (len(shown) - 1)
    several = (await post(PATH, {**COMPLETION, "return_token_ids": True, "prompt": ["ab", "c"]})).object
    assert in_choices(several) == [[*b"ab"]] * 2 + [[*b"c"]] * 2

    path, prompt = "/v1/chat/completions", [*b"u:Hello\n"]
    whole = (await post(path, {**CHAT, "return_token_ids": True})).object
    assert whole["prompt_token_ids"] == prompt
    assert in_choices(whole) == [None] * 2
    first, *others = (await post(path, {**CHAT, "return_token_ids": True, "stream": True})).chunks
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in others)
    assert "prompt_token_ids" not in (await post(path, CHAT)).object


@pytest.mark.parametrize(("path", "body"), [(PATH, COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_each_chunk_may_have_the_usage_of_its_choice(templates, path, body, post):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "stream": True, "return_token_ids": True}
    *chunks, last = (await post(path, {**asked, "stream_options": options})).chunks
    num_tokens = [0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        num_tokens[choice["index"]] += len(choice["token_ids"])
        shown = dict.fromkeys(("prompt_tokens", "total_tokens"), last["usage"]["prompt_tokens"])
        shown["total_tokens"] += num_tokens[choice["index"]]
        assert chunk["usage"] == {**shown, "completion_tokens": num_tokens[choice["index"]]}
    assert last["usage"]["completion_tokens"] == sum(num_tokens) == 12
    alone = await post(path, {**asked, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in chunk for chunk in alone.chunks)


async def test_a_beam_search_has_the_name_of_vllm(post):
    beams = {**GREEDY, "n": 3, "length_penalty": 0.5}
    found, same = [
        (await post(PATH, {**beams, **name})).object["choices"]
        for name in ({"use_beam_search": True, "early_stopping": False}, {"beam_width": 3})
    ]
    assert found == same and len(found) == 3
    one = await post(PATH, {**GREEDY, "temperature": 1, "use_beam_search": True})
    assert one.object["choices"] == (await post(PATH, GREEDY)).object["choices"]
    drawn = await post(PATH, {**beams, "use_beam_search": True, "top_p": 0.5})
    assert (drawn.status, drawn.error["param"]) == (400, "top_p")


async def test_log_probabilities_may_name_tokens_by_id(templates, post):
    more = {"n": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    for path, body in (
        (PATH, {**COMPLETION, "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    ):
        streamed = (await post(path, {**body, **more, "stream": True})).chunks
        for answers in ([(await post(path, {**body, **more})).object], streamed):
            choices = [each["choices"][0] for each in answers]
            shown = [each["logprobs"] for each in choices if each["logprobs"]]
            named = [name for each in shown for name in each.get("tokens") or [one["token"] for one in each["content"]]]
            tokens = PROMPT * (path == PATH) + [token for choice in choices for token in choice["token_ids"]]
            assert named == [f"token_id:{token}" for token in tokens]
