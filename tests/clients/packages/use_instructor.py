"""instructor: a model of Pydantic in each of its modes for OpenAI's API; partial and iterable answers."""

from typing import Any

import instructor
import openai
from cases import BASE, MODEL, case, run
from instructor import Mode
from pydantic import BaseModel
from typed import Person


class Remark(BaseModel):
    remark: Any = None


client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=9)
WHO = [{"role": "user", "content": "Invent a person with a name, an age and a mood."}]
ASKED = {"model": MODEL, "messages": WHO, "temperature": 0, "max_tokens": 200, "max_retries": 0}
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA)


def asks(mode):
    def ask():
        return instructor.from_openai(client, mode=mode).create(response_model=Person, **ASKED).model_dump()

    ask.__name__ = mode.name.lower()
    return ask


for each in MODES:
    case(asks(each))


@case
def md_json():
    """This mode asks in words alone, and any object is a remark."""
    made = instructor.from_openai(client, mode=Mode.MD_JSON).create(response_model=Remark, stop=["\n```"], **ASKED)
    return made.model_dump()


@case
def partial():
    parts = instructor.from_openai(client, mode=Mode.JSON_SCHEMA).create_partial(response_model=Person, **ASKED)
    return [part.model_dump() for part in parts][-1]


@case
def iterable():
    people = instructor.from_openai(client, mode=Mode.TOOLS).create_iterable(response_model=Person, **ASKED)
    return [person.model_dump() for person in people]


run()
