"""Outlines: its OpenAI and vLLM backends; texts, a Pydantic model, a choice, a regular expression, a grammar."""

import re
from typing import Literal

import openai
import outlines
from cases import BASE, MODEL, case, run
from outlines.types import CFG, Regex
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["calm", "merry"]


client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=9)
as_openai = outlines.from_openai(client, MODEL)
as_vllm = outlines.from_vllm(client, MODEL)
EVEN = {"temperature": 0, "max_tokens": 100}
WHO = "Invent a person with a name, an age and a mood. Answer in JSON."


@case
def text():
    return as_openai("Tell me a story of the sea.", temperature=0, max_tokens=32)


@case
def stream():
    return "".join(as_vllm.stream("Tell me a story of the sea.", **EVEN))


@case
def schema():
    return Person.model_validate_json(as_openai(WHO, Person, **EVEN)).model_dump()


@case
def vllm_schema():
    return Person.model_validate_json(as_vllm(WHO, Person, **EVEN)).model_dump()


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


run()
