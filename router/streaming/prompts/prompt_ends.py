"""The two ends of a prompt: the tokens that a tokenizer puts before it, and how much of a long one is kept."""

from collections.abc import Sequence
from typing import Any

from octavo.request import limits
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.encoded_prompt import NAME_LANGUAGE, NO_SPEECH
from octavo.v1 import inference_pb2
from router.fleet.model_registry import ServedModel

Prompted = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


def encoded_text(text: str, request: Prompted, model: ServedModel) -> list[int]:
    """The tokens of a text. What an encoder reads is whole: it has the tokens that come after a text, too."""
    if not model.encoder.exists:
        return model.tokenizer.encode(text)
    if request.HasField("add_special_tokens") and not request.add_special_tokens:
        return model.tokenizer.encode_plain(text)
    return model.tokenizer.encode_whole(text)


def refuse_encoded(field: str, model: ServedModel) -> None:
    """Raises InvalidArgument if the model has an encoder, for which no prompt is the beginning of another."""
    if model.encoder.exists:
        raise InvalidArgument(field, f"{model.name} encodes prompts whole, and none begins with another: leave it out")


def refuse_unspoken(request: inference_pb2.GenerateRequest, model: ServedModel) -> bool:
    """Whether the prompt is speech. Raises InvalidArgument if it is not, for a model that hears nothing else."""
    field: str | None = request.WhichOneof("input")
    if model.encoder.speech is not None and field not in ("speech", None):
        raise InvalidArgument(field, f"{model.name} writes down what it hears: send speech, or ask another model")
    return field == "speech"


def asking_of_sound(
    params: SamplingParams, request: inference_pb2.GenerateRequest, model: ServedModel
) -> SamplingParams:
    """The parameters of a request that asks which language is spoken, or whether one is: its output is one token.

    Of those that the client and the model have for a text, only how a language is drawn and reported is left.
    """
    known, task = model.encoder.speech, request.speech.task
    if known is None or task not in (NAME_LANGUAGE, NO_SPEECH):
        return params
    kept: dict[str, Any] = {name: getattr(params, name) for name in ("n", "temperature", "seed", "logprobs")}
    allowed = tuple(sorted(known.languages.values()))
    if task == NO_SPEECH:  # ranked, so that its score is that of the model itself, which has other tokens, too
        kept, allowed = {"temperature": 0.0, "best_of": 2}, (known.no_speech,)
    return SamplingParams(**kept, max_tokens=1, allowed_token_ids=allowed, skip_special_tokens=False)


def with_beginning(token_ids: list[int], request: Prompted, model: ServedModel) -> list[int]:
    """A text without the tokens that stand before each text of the model, or a chat with them, as the client says."""
    match request.WhichOneof("input"), request.add_special_tokens:
        case (("text" | "raw_text"), False):
            return token_ids[len(model.tokenizer.encode("")) :]
        case "chat", True:
            return [*model.tokenizer.encode(""), *token_ids]
    return token_ids


def check_truncation(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Raises InvalidArgument if the request keeps a number of tokens that is none, or tokens of what is read whole."""
    if request.HasField("truncate_prompt_tokens") and model.encoder.exists:
        raise InvalidArgument("truncate_prompt_tokens", "does not go with a model that has an encoder; leave it out")
    keep = request.truncate_prompt_tokens
    if request.HasField("truncate_prompt_tokens") and keep != -1 and keep < 1:
        raise InvalidArgument("truncate_prompt_tokens", f"{keep} is out of range; allowed is 1 or more, or -1")


def truncated(token_ids: Sequence[int], request: inference_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    """The last or first tokens of the prompt, as many as the request keeps."""
    if not request.HasField("truncate_prompt_tokens"):
        return list(token_ids)
    keep = request.truncate_prompt_tokens
    if keep < 1:
        named = request.sampling.HasField("max_tokens")
        recommended = model.sampling_defaults.get("max_tokens", limits.DEFAULT_MAX_TOKENS)
        max_tokens = request.sampling.max_tokens if named else int(recommended)
        keep = model.context_tokens - max(1, min(max_tokens, model.context_tokens // 2))
    return list(token_ids[:keep] if request.keep_prompt_start else token_ids[-keep:])
