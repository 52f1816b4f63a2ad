"""A model of Pydantic and a tool, for packages that have it."""

from typing import Literal

from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    mood: Literal["calm", "merry"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"
