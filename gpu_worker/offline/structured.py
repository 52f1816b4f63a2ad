"""vLLM's way to say what form outputs have."""

import json as json_module
from dataclasses import dataclass
from typing import Any

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import Constraint, Shape
from octavo.text.closed_schemas import closed_if_object


@dataclass(slots=True)
class StructuredOutputsParams:
    """The form of outputs: one of its fields. `grammar` is a Lark grammar. JSON comes on one line."""

    json: str | dict[str, Any] | type | None = None  # a class is one of Pydantic's models
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.to_constraint()

    def to_constraint(self) -> Constraint:
        """The constraint that it means. Raises InvalidArgument unless one field is given, with a value of its type."""
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name)}
        if len(given) != 1:
            raise InvalidArgument("structured_outputs", f"needs one of {', '.join(self.__slots__)}; has {len(given)}")
        ((name, value),) = given.items()
        match name, value:
            case "json_object", True:
                return Constraint(Shape.JSON_OBJECT)
            case "choice", [*texts] if all(isinstance(text, str) for text in texts):
                return Constraint.choice(texts)
            case "json", (str() | dict()):
                return Constraint(Shape.JSON_SCHEMA, _as_text(closed_if_object(value)))
            case "json", type() if hasattr(value, "model_json_schema"):
                return Constraint(Shape.JSON_SCHEMA, _as_text(closed_if_object(value.model_json_schema())))
            case "structural_tag", (str() | dict()):
                return Constraint(Shape.STRUCTURAL_TAG, _as_text(value))
            case (("regex" | "grammar"), str()):
                return Constraint(Shape.REGEX if name == "regex" else Shape.LARK, value)
        raise InvalidArgument(f"structured_outputs.{name}", f"must not be a value of type {type(value).__name__}")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)
