"""The wire side of Embed and Score."""

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.v1 import inference_pb2
from octavo.wire.pooling import pooling_name
from octavo.wire.public import usage_to_wire
from router.pooling.pooling_calls import AskedScores, PoolingCalls, PromptInput

MOST_BYTES = limits.MAX_MESSAGE_BYTES * 7 // 8
VECTOR_BYTES = 16  # tags and lengths around one vector


async def answer_embed(
    calls: PoolingCalls, request: inference_pb2.EmbedRequest, remaining_s: float | None
) -> inference_pb2.EmbedResponse:
    model = calls.find_model(request.model if request.HasField("model") else None)
    if request.HasField("dimensions") and not request.dimensions:
        raise InvalidArgument("dimensions", "0 numbers are no vector; leave it out for all")
    normalize = request.normalize if request.HasField("normalize") else None
    asked = model.pooling.resolved(pooling_name(request.pooling), normalize, request.dimensions)
    num_bytes = len(request.inputs) * (4 * (asked.dimensions or model.pooling.hidden_size) + VECTOR_BYTES)
    if num_bytes > MOST_BYTES:
        what = f"{len(request.inputs)} vectors do not fit into one message"
        raise InvalidArgument("inputs", f"{what}: send at most {len(request.inputs) * MOST_BYTES // num_bytes}")
    inputs: list[PromptInput] = []
    for place, each in enumerate(request.inputs):
        kind = each.WhichOneof("input")
        if kind is None:
            raise InvalidArgument(f"inputs[{place}]", "send text or token_ids")
        inputs.append(each.text if kind == "text" else each.token_ids.ids)
    answer = await calls.embed(model, inputs, asked, remaining_s)
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=vector.numbers) for vector in answer.vectors],
        usage=usage_to_wire(answer.num_tokens, 0, answer.cached_tokens),
        model=answer.model,
    )


async def answer_score(
    calls: PoolingCalls, request: inference_pb2.ScoreRequest, remaining_s: float | None
) -> inference_pb2.ScoreResponse:
    model = calls.find_model(request.model if request.HasField("model") else None)
    asked = AskedScores(left=request.left, right=request.right, method=request.method, instruction=request.instruction)
    answer = await calls.score(model, asked, remaining_s)
    return inference_pb2.ScoreResponse(
        scores=answer.scores,
        usage=usage_to_wire(answer.num_tokens, 0, answer.cached_tokens),
        model=answer.model,
    )
