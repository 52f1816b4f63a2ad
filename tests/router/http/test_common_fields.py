"""Fields of both endpoints that vLLM has, against routers and workers in this process."""

import logging

import pytest

from octavo.v1 import inference_pb2
from router.http.chat_completions import read_chat
from router.http.completions import read_completion

PROMPT = list(range(3, 40))
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0, "DEFAULT"),
        (-7, "INTERACTIVE"),
        (3.0, "BULK"),
        (2**63, "BULK"),
        ("system", "SYSTEM"),
        ("bulk", "BULK"),
    ],
)
def test_a_priority_may_be_a_number(value, name):
    request = read_completion({"prompt": "x", "priority": value}).request
    assert request.priority == inference_pb2.Priority.Value(f"PRIORITY_{name}")


def test_a_top_k_of_minus_one_is_none():
    request = read_chat({"messages": [{"role": "user", "content": "x"}], "top_k": -1}).request
    assert request.sampling.HasField("top_k")
    assert request.sampling.top_k == 0


async def test_greedy_outputs_are_equal(world, call):
    await world.start()
    one = (await call("POST", PATH, GREEDY)).object["choices"][0]["text"]
    for more in ({"n": 3}, {"n": 2, "best_of": 4}):
        choices = (await call("POST", PATH, {**GREEDY, **more})).object["choices"]
        assert [choice["text"] for choice in choices] == [one] * more["n"]


async def test_answers_and_chunks_name_the_model_by_content(world, call):
    await world.start()
    whole = (await call("POST", PATH, GREEDY)).object
    chunks = (await call("POST", PATH, {**GREEDY, "stream": True})).chunks
    (model,) = world.routers[0].models.list_models()
    assert {whole["system_fingerprint"], *(chunk["system_fingerprint"] for chunk in chunks)} == {model.fingerprint}


async def test_the_prompt_is_cut_from_the_left(world, call):
    await world.start()
    context = world.routers[0].models.list_models()[0].context_tokens
    last = (await call("POST", PATH, {**GREEDY, "prompt": PROMPT[-5:]})).object
    for prompt in (PROMPT, PROMPT * context):  # the second is longer than the context
        cut = (await call("POST", PATH, {**GREEDY, "prompt": prompt, "truncate_prompt_tokens": 5})).object
        assert cut["usage"]["prompt_tokens"] == 5
        assert cut["choices"][0]["text"] == last["choices"][0]["text"]
    fitting = await call("POST", PATH, {**GREEDY, "prompt": PROMPT * context, "truncate_prompt_tokens": -1})
    assert fitting.object["usage"]["prompt_tokens"] == context - 20
    echoed = {"prompt": "abcdef", "max_tokens": 1, "echo": True, "truncate_prompt_tokens": 2}
    assert (await call("POST", PATH, echoed)).object["choices"][0]["text"].startswith("ef")


async def test_log_probabilities_of_prompts_have_the_shape_of_vllm(world, call):
    await world.start()
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    choices = (await call("POST", PATH, body)).object["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *rest = choices[0]["prompt_logprobs"]
    assert first is None
    for char, entries in zip("nce", rest, strict=True):
        assert entries[str(ord(char))]["decoded_token"] == char
    plain = (await call("POST", PATH, {**body, "prompt_logprobs": None})).object
    assert "prompt_logprobs" not in plain["choices"][0]
    other = await call("POST", PATH, {**body, "n": 1, "logprobs": 1, "echo": True})
    assert (other.status, other.error["param"]) == (400, "prompt_logprobs")


async def test_the_name_that_a_client_gives_is_in_the_answer_and_the_log(world, call, caplog):
    await world.start()
    with caplog.at_level(logging.INFO):
        first, second = [await call("POST", PATH, GREEDY, x_request_id="trace-7") for _ in range(2)]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "trace-7"
    assert first.object["id"] != second.object["id"]
    assert first.headers["x-octavo-request-id"] == first.object["id"]
    refused = await call("POST", PATH, {}, x_request_id="trace-8")
    assert (refused.status, refused.headers["x-request-id"]) == (400, "trace-8")
    unfit = await call("POST", PATH, GREEDY, x_request_id="x" * 129)
    assert unfit.headers["x-request-id"] == unfit.object["id"]


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget"])
async def test_a_budget_for_thinking_needs_a_model_that_thinks(world, call, name):
    await world.start()
    refused = await call("POST", PATH, {**GREEDY, name: 3})
    assert (refused.status, refused.error["param"]) == (400, "thinking_budget")
    assert (await call("POST", PATH, {**GREEDY, name: 3, "thinking_end_ids": [7]})).status == 200
