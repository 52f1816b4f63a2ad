"""What the SDK sends and returns for vectors and scores of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request import errors
from octavo.v1 import pooling_pb2, types_pb2

POOLINGS = {"": pooling_pb2.POOLING_UNSPECIFIED, "last": pooling_pb2.POOLING_LAST, "mean": pooling_pb2.POOLING_MEAN}


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector for each input, in their order."""

    vectors: list[list[float]]
    model: str
    prompt_tokens: int  # of all inputs
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Scores:
    """A score for each pair, in their order."""

    scores: list[float]
    model: str
    prompt_tokens: int


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    model: str | None,
    dimensions: int | None,
    pooling: str,
    normalize: bool | None,
) -> pooling_pb2.EmbedRequest:
    """The message. Raises InvalidArgument for what no message can hold."""
    if isinstance(inputs, str) or not all(isinstance(each, (str, Sequence)) for each in inputs):
        raise errors.InvalidArgument("inputs", "give a list of texts, or of lists of token ids")
    if pooling not in POOLINGS:
        raise errors.InvalidArgument("pooling", f"{pooling!r} is not one of last, mean")
    try:
        made = [
            pooling_pb2.EmbedInput(text=each)
            if isinstance(each, str)
            else pooling_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=each))
            for each in inputs
        ]
        request = pooling_pb2.EmbedRequest(model=model, inputs=made, dimensions=dimensions, pooling=POOLINGS[pooling])
        if normalize is not None:
            request.normalize = normalize
        return request
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument("inputs", f"cannot be sent: {error}") from None


def embeddings_of(reply: pooling_pb2.EmbedResponse) -> Embeddings:
    vectors = [list(each.values) for each in reply.embeddings]
    return Embeddings(vectors, reply.model, reply.usage.prompt_tokens, reply.usage.cached_tokens)


def score_request(
    left: str | Sequence[str], right: str | Sequence[str], model: str | None, method: str, instruction: str
) -> pooling_pb2.ScoreRequest:
    sides = [[side] if isinstance(side, str) else list(side) for side in (left, right)]
    try:
        return pooling_pb2.ScoreRequest(
            model=model, left=sides[0], right=sides[1], method=method, instruction=instruction
        )
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument("left", f"these texts cannot be sent: {error}") from None


def scores_of(reply: pooling_pb2.ScoreResponse) -> Scores:
    return Scores(list(reply.scores), reply.model, reply.usage.prompt_tokens)
