"""POST /rerank and /score: how well texts fit, in the forms of Jina, Cohere and vLLM."""

import time
from collections.abc import Sequence
from typing import Any

from octavo.pooling.params import MAX_INPUTS
from octavo.request.errors import InvalidArgument
from octavo.request.limits import NumberRange
from router.http.bodies.field_reader import FieldReader, checked_text
from router.http.vectors.vector_endpoint import Content
from router.pooling.pooling_calls import AskedScores, PoolingCalls

TOP = NumberRange(1, MAX_INPUTS, integer=True)
LEFT = ("text_1", "queries", "data_1")  # vLLM's names, and those of what they are compared with
RIGHT = {"text_1": ("text_2",), "queries": ("documents", "items"), "data_1": ("data_2",)}


async def answer_rerank(calls: PoolingCalls, fields: FieldReader, remaining_s: float | None) -> tuple[int, Content]:
    """The documents by how well they answer the query, the best first."""
    name, query = fields.take_text("model"), fields.take_text("query")
    if not query:
        fields.refuse("query", "must be a text")
    documents = fields.checks.run(read_documents, fields.take_any("documents")) or []
    top = fields.take_number("top_n", TOP)
    returns = fields.take_flag("return_documents", True)
    asked = _read_asked(fields, [query], documents, "query", "documents")
    answer = await calls.score(calls.find_model(name or None), asked, remaining_s)
    ranked = sorted(enumerate(answer.scores), key=lambda pair: (-pair[1], pair[0]))[:top]

    def content() -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        for index, score in ranked:
            results.append({"index": index, "relevance_score": score})
            if returns:
                results[-1]["document"] = {"text": documents[index]}
        return {
            "model": name or answer.model,
            "usage": {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens},
            "results": results,
        }

    return len(ranked), content


async def answer_score(calls: PoolingCalls, fields: FieldReader, remaining_s: float | None) -> tuple[int, Content]:
    """A score for each pair, in their order."""
    name = fields.take_text("model")
    first, left_value = _take_one(fields, LEFT)
    second, right_value = _take_one(fields, RIGHT[first])
    left = fields.checks.run(read_texts, first, left_value) or []
    right = fields.checks.run(read_texts, second, right_value) or []
    fields.take_harmless("encoding_format", ["float"], "scores are numbers; leave it out")
    asked = _read_asked(fields, left, right, first, second)
    answer = await calls.score(calls.find_model(name or None), asked, remaining_s)

    def content() -> dict[str, Any]:
        return {
            "object": "list",
            "created": int(time.time()),
            "model": name or answer.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(answer.scores)],
            "usage": {"prompt_tokens": answer.num_tokens, "total_tokens": answer.num_tokens},
        }

    return len(answer.scores), content


def _take_one(fields: FieldReader, names: Sequence[str]) -> tuple[str, Any]:
    """The first of these fields that is given, and its value; if none is, the first of them."""
    for name in names:
        if (value := fields.take_any(name)) is not None:
            return name, value
    return names[0], None


def _read_asked(
    fields: FieldReader, left: list[str], right: list[str], left_field: str, right_field: str
) -> AskedScores:
    """The fields that both have. Raises InvalidArgument with all that is wrong with the body."""
    method, instruction = fields.take_text("method"), fields.take_text("instruction")
    fields.take_ignored(("user",))
    fields.refuse_rest()
    fields.checks.raise_found()
    return AskedScores(
        left=left,
        right=right,
        method=method,
        instruction=instruction,
        left_field=left_field,
        right_field=right_field,
    )


def read_texts(field: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [checked_text(field, value)]
    if not isinstance(value, list) or not value:
        raise InvalidArgument(field, "must be a text or a list of texts")
    return [checked_text(f"{field}[{i}]", each) for i, each in enumerate(value)]


def read_documents(value: Any) -> list[str]:
    """Texts, or objects that have each a text. Raises InvalidArgument."""
    if not isinstance(value, list) or not value:
        raise InvalidArgument("documents", "must be a list of texts")
    texts = []
    for i, each in enumerate(value):
        if isinstance(each, dict) and list(each) == ["text"]:
            each = each["text"]
        texts.append(checked_text(f"documents[{i}]", each))
    return texts
