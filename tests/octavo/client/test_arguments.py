"""Keyword arguments of the SDK: their types are those of the parameters, and a misspelt one is refused."""

import subprocess
import sys

import pytest

from octavo.client.arguments import RequestArguments, generate_request, make_sampling, set_bad_words, set_variables
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS, SamplingArguments, SamplingParams
from octavo.v1 import inference_pb2, types_pb2


def test_every_parameter_is_an_argument():
    assert list(SamplingArguments.__annotations__) == list(PARAMETERS)
    assert SamplingArguments.__annotations__.keys() < RequestArguments.__annotations__.keys()


@pytest.mark.parametrize(
    ("sampling", "arguments", "expected"),
    [
        (None, {}, SamplingParams()),
        (SamplingParams(n=2, seed=1), {"n": 3}, SamplingParams(n=3, seed=1)),
        (None, {"stop": "end"}, SamplingParams(stop=("end",))),
        (None, {"stop": None, "stop_token_ids": None, "logit_bias": None}, SamplingParams()),
        (SamplingParams(stop=("end",)), {"stop": None}, SamplingParams()),
        (None, dict.fromkeys(SamplingArguments.__annotations__), SamplingParams()),
        (SamplingParams(stop=None, allowed_token_ids=None), {}, SamplingParams()),
        (SamplingParams(stop="end"), {}, SamplingParams(stop=("end",))),
    ],
)
def test_none_is_the_default_and_one_stop_string_is_a_list_of_one(sampling, arguments, expected):
    assert make_sampling(sampling, arguments) == expected


SNIPPET = """
from octavo.client import AsyncClient, Client

messages = [{"role": "user", "content": "Hi"}]

def use(client: Client, other: AsyncClient) -> None:
    client.generate("x", max_tokens=5, stop="x", deadline_s=3, priority="bulk")
    client.complete(messages, temperature=0)
    other.generate(messages, max_tokens=5, model="m")
    client.generate("x", max_tokenz=5)
    client.complete("x", max_tokenz=5)
    other.generate("x", max_tokenz=5)
    client.generate("x", max_tokens="5")
    client.attach("x", deadline=3)

async def use_async(client: AsyncClient) -> None:
    await client.complete("x", max_tokenz=5)
"""
WRONG = {10: "call-arg", 11: "call-arg", 12: "call-arg", 13: "arg-type", 14: "call-arg", 17: "call-arg"}


@pytest.mark.slow
def test_mypy_refuses_a_misspelt_argument(root, tmp_path):
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [*command, "--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(file)],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        where, kind, what = line.split(": ", 2)
        if kind == "error":
            found[int(where.rsplit(":", 1)[1])] = what.rsplit("[", 1)[1].rstrip("]")
    assert found == WRONG, done.stdout + done.stderr


def test_variables_of_a_chat_template_go_with_messages_alone():
    options = {"request_id": "r", "model": None, "priority": "", "keep": False}
    chat = generate_request([("user", "Hi")], types_pb2.SamplingParams(), **options)
    set_variables(chat, {"enable_thinking": False})
    assert chat.chat.template_kwargs_json == '{"enable_thinking": false}'
    text = generate_request("Hi", types_pb2.SamplingParams(), **options)
    set_variables(text, None)
    for request, variables in ((text, {"a": 1}), (chat, {"a": {1, 2}})):
        with pytest.raises(InvalidArgument) as caught:
            set_variables(request, variables)
        assert caught.value.field == "chat_template_kwargs"


def test_words_that_do_not_come_are_texts():
    for given, sent in (("one", ["one"]), (["one", "two"], ["one", "two"]), ((), [])):
        request = inference_pb2.GenerateRequest()
        set_bad_words(request, given)
        assert request.bad_words == sent
    for wrong in (3, [3], ["\ud800"]):
        with pytest.raises(InvalidArgument, match="bad_words: give texts"):
            set_bad_words(inference_pb2.GenerateRequest(), wrong)
