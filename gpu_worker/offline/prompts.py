"""The forms in which a caller of LLM gives prompts: texts, token ids, and dictionaries with either."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NotRequired, TypeAlias, TypedDict, cast

from gpu_worker.offline.absent import PROMPT_KEYS, refuse_absent
from octavo.pictures.reader import NOTHING_SHOWN, ShownPictures
from octavo.request.errors import InvalidArgument
from octavo.request.validation import validate_salt


class TextPrompt(TypedDict):
    """A prompt as a text. Prompts with different salts share no blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is their text, if the caller knows it: outputs have it, the model does not."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptArgument: TypeAlias = str | Sequence[int] | Mapping[str, object]  # one prompt; a mapping is one of the above
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class OfflinePrompt:
    """One prompt, checked for its form only: a text, or token ids whose text may be known."""

    argument: str  # where the caller gave it, such as prompts[3]
    text: str | None = None
    token_ids: Sequence[int] | None = None
    salt: str = ""
    pictures: ShownPictures = NOTHING_SHOWN


def read_prompts(
    prompts: PromptArgument | Sequence[PromptArgument] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> list[OfflinePrompt]:
    """The prompts of one call, in their order; no prompt of an empty list. Raises InvalidArgument or Unimplemented.

    `prompt_token_ids` is the old way to give token ids. Beside it, `prompts` are the texts of those ids.
    """
    if prompt_token_ids is not None:
        return _with_token_ids(prompts, prompt_token_ids)
    if prompts is None:
        raise InvalidArgument("prompts", "is missing; give a text, token ids, or a list of prompts")
    single = isinstance(prompts, (str, Mapping)) or (_all_ids(prompts) and len(prompts) > 0)
    if not single and (not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray))):
        raise InvalidArgument("prompts", f"a {type(prompts).__name__} is no prompt; {_FORMS}")
    listed = cast("Sequence[object]", [prompts] if single else prompts)
    return [_read(prompt, f"prompts[{i}]") for i, prompt in enumerate(listed)]


_FORMS = 'give a text, a list of token ids, {"prompt": …} or {"prompt_token_ids": […]}'


def _with_token_ids(prompts: object, prompt_token_ids: object) -> list[OfflinePrompt]:
    if not isinstance(prompt_token_ids, Sequence) or isinstance(prompt_token_ids, (str, bytes)):
        raise InvalidArgument("prompt_token_ids", f"a {type(prompt_token_ids).__name__} is no list of token ids")
    single = _all_ids(prompt_token_ids) and len(prompt_token_ids) > 0
    listed = cast("Sequence[object]", [prompt_token_ids] if single else prompt_token_ids)
    texts = [None] * len(listed) if prompts is None else [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(text is None or isinstance(text, str) for text in texts):
        raise InvalidArgument("prompts", "beside prompt_token_ids, prompts are the texts of the same prompts")
    if len(texts) != len(listed):
        raise InvalidArgument("prompt_token_ids", f"{len(listed)} prompts, but prompts has {len(texts)}")
    return [
        OfflinePrompt(f"prompt_token_ids[{i}]", text, _ids(ids, f"prompt_token_ids[{i}]"))
        for i, (text, ids) in enumerate(zip(texts, listed, strict=True))
    ]


def _read(prompt: object, argument: str) -> OfflinePrompt:
    if isinstance(prompt, str):
        return OfflinePrompt(argument, prompt)
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt, argument)
    return OfflinePrompt(argument, None, _ids(prompt, argument))


def _of_mapping(prompt: Mapping[str, object], argument: str) -> OfflinePrompt:
    try:
        refuse_absent(argument, prompt, _KEYS, PROMPT_KEYS)
    except TypeError as error:
        raise InvalidArgument(argument, str(error).removeprefix(f"{argument} ").replace("option", "key", 1)) from None
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise InvalidArgument(argument, "has neither prompt nor prompt_token_ids; give one of them")
    if text is not None and not isinstance(text, str):
        raise InvalidArgument(
            f"{argument}.prompt", f"a {type(text).__name__} is no text; token ids go to prompt_token_ids"
        )
    token_ids = None if ids is None else _ids(ids, f"{argument}.prompt_token_ids")
    checked_salt = "" if salt is None else validate_salt(f"{argument}.cache_salt", salt)
    return OfflinePrompt(argument, text, token_ids, checked_salt)


def _ids(value: object, argument: str) -> Sequence[int]:
    if not _all_ids(value):
        raise InvalidArgument(argument, f"a {type(value).__name__} is neither text nor a list of token ids; {_FORMS}")
    return [int(token_id) for token_id in cast("Sequence[int]", value)]


def _all_ids(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        return False
    return all(isinstance(item, Integral) for item in value)
