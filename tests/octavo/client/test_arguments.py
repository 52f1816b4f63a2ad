"""Keyword arguments of the SDK: their types are those of the parameters, and a misspelt one is refused."""

from inspect import signature
from typing import Unpack

import pytest

from octavo.client import AsyncClient, Client
from octavo.client.arguments import (
    RequestArguments,
    embed_request,
    fill_prompt,
    generate_request,
    make_sampling,
    score_request,
    set_bad_words,
    set_variables,
)
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS, SamplingArguments, SamplingParams
from octavo.v1 import inference_pb2, types_pb2


def test_every_parameter_is_an_argument():
    assert list(SamplingArguments.__annotations__) == list(PARAMETERS)
    assert SamplingArguments.__annotations__.keys() < RequestArguments.__annotations__.keys()


@pytest.mark.parametrize("cls", [Client, AsyncClient])
@pytest.mark.parametrize(("method", "known"), [("generate", SamplingArguments), ("complete", RequestArguments)])
def test_a_type_checker_knows_the_arguments(cls, method, known):
    [options] = [each for each in signature(getattr(cls, method)).parameters.values() if each.kind is each.VAR_KEYWORD]
    assert options.annotation == Unpack[known]


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


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: embed_request("Hi", None, None, "", None), "inputs"),
        (lambda: embed_request([3], None, None, "", None), "inputs"),
        (lambda: embed_request([[-1]], None, None, "", None), "inputs"),
        (lambda: embed_request(["Hi"], None, None, "first", None), "pooling"),
        (lambda: score_request("\ud800", "d", None, "", ""), "left"),
        (lambda: fill_prompt(inference_pb2.TokenizeRequest(), [1]), "prompt"),
        (lambda: Client("a:1;b:99999"), "endpoints"),
    ],
)
def test_what_no_message_can_hold_is_refused_by_name(make, field):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_words_that_do_not_come_are_texts():
    for given, sent in (("one", ["one"]), (["one", "two"], ["one", "two"]), ((), [])):
        request = inference_pb2.GenerateRequest()
        set_bad_words(request, given)
        assert request.bad_words == sent
    for wrong in (3, [3], ["\ud800"]):
        with pytest.raises(InvalidArgument, match="bad_words: give texts"):
            set_bad_words(inference_pb2.GenerateRequest(), wrong)
