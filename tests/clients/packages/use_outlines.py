"""Outlines: its OpenAI and vLLM backends; texts, a Pydantic model, a choice, a regular expression, a grammar."""

import re
from typing import Literal

import openai
import outlines
from cases import BASE, MODEL, TELL, WHO, case, run
from outlines.types import CFG, Regex
from typed import Person

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=9)
as_openai = outlines.from_openai(client, MODEL)
as_vllm = outlines.from_vllm(client, MODEL)
EVEN = {"temperature": 0, "max_tokens": 100}


@case
def choice():
    found = as_vllm("Is the sea wet?", Literal["yes", "no"], **EVEN)
    assert found in ("yes", "no")
    return found


@case
def regex():
    found = as_vllm("When did Columbus sail?", Regex(r"1[0-9]{3}-[01][0-9]"), **EVEN)
    assert re.fullmatch(r"1[0-9]{3}-[01][0-9]", found)
    return found


@case
def grammar():
    found = as_vllm("Add two numbers.", CFG('start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,2}/'), **EVEN)
    assert re.fullmatch(r"\d{1,2}\+\d{1,2}", found)
    return found


run(
    text=lambda: as_openai(TELL, temperature=0, max_tokens=32),
    stream=lambda: "".join(as_vllm.stream(TELL, **EVEN)),
    schema=lambda: Person.model_validate_json(as_openai(WHO, Person, **EVEN)).model_dump(),
    vllm_schema=lambda: Person.model_validate_json(as_vllm(WHO, Person, **EVEN)).model_dump(),
)
