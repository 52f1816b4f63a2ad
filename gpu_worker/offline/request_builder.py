"""From the arguments of LLM.generate and LLM.chat to requests that are encoded and checked, with concrete parameters.

An error names the argument: prompts[3], sampling_params[3].top_p.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, cast

from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.scheduling.step import RunnerInfo
from octavo import validation
from octavo.errors import InvalidArgument
from octavo.sampling import SamplingParams
from octavo.text.stop import TextStream
from octavo.text.tokenizer import AnyTokenizer

PromptArgument = str | Sequence[int]  # one prompt: text or token ids
ChatTurn = Mapping[str, str]  # one message of a conversation: {"role": ..., "content": ...}
ParamsArgument = SamplingParams | Sequence[SamplingParams] | None  # for all, or one for each


class RequestBuilder:
    """Makes requests of prompts and conversations. A request without a seed of its own draws one from `seeds`."""

    def __init__(self, info: RunnerInfo, tokenizer: AnyTokenizer, seeds: random.Random) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._seeds = seeds
        self.default_params = replace(SamplingParams(), **cast("dict[str, Any]", info.sampling_defaults))

    def from_prompts(
        self, prompts: PromptArgument | Sequence[PromptArgument], params: ParamsArgument
    ) -> list[OfflineRequest]:
        """One request for each prompt, in their order. Raises InvalidArgument."""
        single = bool(prompts) and (isinstance(prompts, str) or _all_ids(prompts))
        listed = cast("Sequence[PromptArgument]", [prompts] if single else prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        tokens = [self._encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(listed)]
        return self._requests("prompts", texts, tokens, params)

    def from_conversations(
        self, conversations: Sequence[ChatTurn] | Sequence[Sequence[ChatTurn]], params: ParamsArgument
    ) -> list[OfflineRequest]:
        """One request for each conversation, in their order. Raises InvalidArgument."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed = cast("Sequence[Sequence[ChatTurn]]", [conversations] if single else conversations)
        tokens = [self._apply_chat(turns, f"conversations[{i}]") for i, turns in enumerate(listed)]
        texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens]
        return self._requests("conversations", texts, tokens, params)

    def _encode(self, prompt: PromptArgument, argument: str) -> list[int]:
        if _all_ids(prompt):
            return [int(token_id) for token_id in prompt]
        text = validation.validate_text(_utf8(prompt, argument), argument, context_tokens=self._info.context_tokens)
        return self._tokenizer.encode(text)

    def _apply_chat(self, turns: Sequence[ChatTurn], argument: str) -> list[int]:
        try:
            messages = [(turn["role"], _utf8(turn["content"], argument)) for turn in turns]
        except (KeyError, TypeError):
            raise InvalidArgument(argument, 'must be a list of {"role": …, "content": …}') from None
        try:
            checked = validation.validate_chat(messages, context_tokens=self._info.context_tokens)
            return self._tokenizer.apply_chat(checked)
        except InvalidArgument as error:
            raise InvalidArgument(argument, error.message) from None

    def _requests(
        self, name: str, texts: Sequence[str | None], tokens: Sequence[list[int]], params: ParamsArgument
    ) -> list[OfflineRequest]:
        each = self._params(params, len(tokens))
        return [
            self._request(f"{name}[{i}]", text, token_ids, own)
            for i, (text, token_ids, own) in enumerate(zip(texts, tokens, each, strict=True))
        ]

    def _params(self, given: ParamsArgument, count: int) -> list[SamplingParams]:
        """One value for each prompt, validated."""
        if given is None or isinstance(given, SamplingParams):
            shared = given or self.default_params
            self._validate(shared, "sampling_params")
            return [shared] * count
        if len(given) != count:
            raise InvalidArgument("sampling_params", f"{len(given)} for {count} prompts; give one, or one for each")
        for i, params in enumerate(given):
            self._validate(params, f"sampling_params[{i}]")
        return list(given)

    def _validate(self, params: SamplingParams, argument: str) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(argument, "must be SamplingParams")
        info = self._info
        try:
            validation.validate_sampling(params, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        except InvalidArgument as error:
            raise InvalidArgument(f"{argument}.{error.field}", error.message.removeprefix(f"{error.field}: ")) from None

    def _request(self, argument: str, text: str | None, token_ids: list[int], params: SamplingParams) -> OfflineRequest:
        """A request that has passed every check."""
        info = self._info
        validation.validate_prompt(
            token_ids, vocab_size=info.vocab_size, context_tokens=info.context_tokens, field=argument
        )
        resolved = validation.resolve(
            params,
            prompt_len=len(token_ids),
            context_tokens=info.context_tokens,
            seed_source=lambda: self._seeds.getrandbits(63),
        )
        return OfflineRequest(argument, text, token_ids, resolved, lambda: self._new_stream(resolved))

    def _new_stream(self, params: SamplingParams) -> TextStream:
        detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens)
        return TextStream.of_branch(detokenizer, params, self._info.eos_token_ids)


def _all_ids(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return all(isinstance(item, Integral) for item in value)


def _utf8(text: object, argument: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidArgument(argument, f"a {type(text).__name__} is neither text nor a list of token ids")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(argument, f"has no UTF-8 form at character {error.start}") from None
