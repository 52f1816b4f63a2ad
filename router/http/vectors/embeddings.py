"""POST /v1/embeddings: texts or token ids, and a vector for each."""

import base64
import time
from typing import Any

from octavo.pooling.params import MAX_CALL_TOKENS, POOLINGS
from octavo.request.errors import InvalidArgument
from octavo.request.limits import NumberRange
from router.http.bodies.field_reader import FieldReader, checked_ids, checked_text
from router.http.vectors.vector_endpoint import Content
from router.pooling.pooling_calls import PoolingCalls, PromptInput

FORMATS = ("float", "base64")
DIMENSIONS = NumberRange(1, 2**31 - 1, integer=True)


async def answer_embeddings(calls: PoolingCalls, fields: FieldReader, remaining_s: float | None) -> tuple[int, Content]:
    """Raises InvalidArgument with all that is wrong, and what a call for vectors raises."""
    name = fields.take_text("model")
    inputs = fields.checks.run(read_inputs, fields.take_any("input")) or []
    form = fields.take_text("encoding_format", "float")
    if form not in FORMATS:
        fields.refuse("encoding_format", f"must be one of {', '.join(FORMATS)}")
    dimensions = fields.take_number("dimensions", DIMENSIONS) or 0
    pooling = fields.take_text("pooling")
    if pooling and pooling not in POOLINGS:
        fields.refuse("pooling", f"must be one of {', '.join(POOLINGS)}")
    normalize = fields.take_flag("normalize") if "normalize" in fields else None
    fields.take_ignored(("user",))
    fields.refuse_rest()
    fields.checks.raise_found()
    model = calls.find_model(name or None)
    asked = model.pooling.resolved(pooling, normalize, dimensions)
    answer = await calls.embed(model, inputs, asked, remaining_s, "input")

    def content() -> dict[str, Any]:
        return {
            "object": "list",
            "created": int(time.time()),
            "model": name or answer.model,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector.values).decode()
                    if form == "base64"
                    else vector.numbers.tolist(),
                }
                for index, vector in enumerate(answer.vectors)
            ],
            "usage": {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens},
        }

    return sum(len(vector.values) for vector in answer.vectors), content


def read_inputs(value: Any) -> list[PromptInput]:
    """One text or many, one list of token ids or many. Raises InvalidArgument."""
    if isinstance(value, str):
        return [checked_text("input", value)]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("input", "must be a text, a list of texts, token ids, or a list of those")
    if type(value[0]) is int:
        return [checked_ids("input", value, MAX_CALL_TOKENS)]
    if isinstance(value[0], str):
        return [checked_text(f"input[{i}]", each) for i, each in enumerate(value)]
    return [checked_ids(f"input[{i}]", each, MAX_CALL_TOKENS) for i, each in enumerate(value)]
