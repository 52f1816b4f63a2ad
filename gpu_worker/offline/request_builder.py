"""From the arguments of LLM.generate and LLM.chat to requests that are encoded and checked, with concrete parameters.

An error names the argument: prompts[3], sampling_params[3].top_p.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from gpu_worker.offline.conversations import (
    ChatOptions,
    CheckedConversation,
    Conversations,
    check_conversation,
    listed_conversations,
)
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.offline.params import OfflineParams
from gpu_worker.offline.prompts import OfflinePrompt
from gpu_worker.steps.runner import RunnerInfo
from octavo.pictures.parts import PicturePart, data_of_url
from octavo.pictures.picture import MAX_PICTURES
from octavo.pictures.reader import NOTHING_SHOWN, READERS, PictureLimits, ReadPicture, place_pictures
from octavo.request import limits, sampling_validation, validation
from octavo.request.chat_messages import ChatTurn
from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.grammar import check_grammar
from octavo.text.stop import TextStream
from octavo.text.thinking import with_thinking_marks
from octavo.text.tokenizers.byte_tokenizer import NO_TEXT, no_tokenizer
from octavo.text.tokenizers.tokenizer import AnyTokenizer

AnyParams = OfflineParams | SamplingParams
DEFAULT_CHAT = ChatOptions()
ParamsArgument = AnyParams | Sequence[AnyParams] | None  # for all, or one for each


class ModelParams(NamedTuple):
    """The parameters of one prompt as they were given, and as the engine knows them for this model."""

    given: OfflineParams
    sampling: SamplingParams


class RequestBuilder:
    """Makes requests of prompts and conversations. A request without a seed of its own draws one from `seeds`."""

    def __init__(self, info: RunnerInfo, tokenizer: AnyTokenizer, seeds: random.Random) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._token_texts: dict[int, str] = {}  # of single tokens, as far as they were asked for

    def default_params(self) -> OfflineParams:
        """The parameters of prompts that come without any: those that the model recommends."""
        return OfflineParams(**cast("dict[str, Any]", self._info.sampling_defaults))

    def from_prompts(self, prompts: Sequence[OfflinePrompt], params: ParamsArgument) -> list[OfflineRequest]:
        """One request for each prompt, in their order. Raises InvalidArgument."""
        each = self._params(params, len(prompts))
        tokens = [self._encode(prompt) for prompt in prompts]
        return [self._request(*parts) for parts in zip(prompts, tokens, each, strict=True)]

    def from_conversations(
        self,
        messages: Conversations,
        params: ParamsArgument,
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[OfflineRequest]:
        """One request for each conversation, in their order. Raises InvalidArgument."""
        listed = listed_conversations(messages)
        names = [f"messages[{i}]" for i in range(len(listed))]
        prompts = [self._apply_chat(*turns, options) for turns in zip(listed, names, strict=True)]
        return self.from_prompts(prompts, params)

    def _encode(self, prompt: OfflinePrompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        context = self._info.context_tokens
        text = validation.validate_text(prompt.text or "", prompt.argument, context_tokens=context, allow_empty=True)
        token_ids = self._tokenizer.encode_whole(text) if self._info.encoder.exists else self._tokenizer.encode(text)
        if not token_ids:
            raise InvalidArgument(prompt.argument, "is empty; give some text, or at least one token id")
        return token_ids

    def _apply_chat(self, turns: Sequence[ChatTurn], argument: str, options: ChatOptions) -> OfflinePrompt:
        chat = check_conversation(turns, argument, self._info.context_tokens)
        pictures = self._read_pictures(chat.pictures)
        tokens, shown = self._tokens_of(chat, argument, options), NOTHING_SHOWN
        if pictures:
            tokens, shown = place_pictures(tokens, pictures, self._info.pictures, argument)
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return OfflinePrompt(argument, text, tokens, pictures=shown)

    def _read_pictures(self, parts: Sequence[PicturePart]) -> list[ReadPicture]:
        limits, support = PictureLimits(count=MAX_PICTURES), self._info.pictures
        read = []
        for part in parts[: limits.count + 1]:
            support.require(part.field)
            data = data_of_url(part.url, part.field, limits.num_bytes)
            read.append(READERS.read(data, support, limits, "", part.field))
        return read

    def _tokens_of(self, chat: CheckedConversation, argument: str, options: ChatOptions) -> list[int]:
        try:
            return self._tokenizer.apply_chat(
                chat.messages,
                options.add_generation_prompt,
                options.tools,
                chat.details,
                options.variables,
                options.continue_final_message,
            )
        except InvalidArgument as error:
            if error.field == "chat_template_kwargs":
                raise
            if error.field == "chat.tools":
                raise InvalidArgument("tools", error.violations[0].description) from None
            raise InvalidArgument(argument, error.message) from None

    def _params(self, given: ParamsArgument, count: int) -> list[ModelParams]:
        if given is None or isinstance(given, AnyParams):
            return [self._validated(given or self.default_params(), "sampling_params")] * count
        if not isinstance(given, Sequence):
            raise InvalidArgument("sampling_params", "must be SamplingParams, or a list with one for each prompt")
        if len(given) != count:
            raise InvalidArgument("sampling_params", f"{len(given)} for {count} prompts; give one, or one for each")
        return [self._validated(params, f"sampling_params[{i}]") for i, params in enumerate(given)]

    def _validated(self, params: AnyParams, argument: str) -> ModelParams:
        """The parameters, checked again: a program may have changed them, and the model has limits of its own."""
        if not isinstance(params, AnyParams):
            raise InvalidArgument(argument, "must be SamplingParams")
        if params.stop and not self._tokenizer.has_text:
            raise no_tokenizer("give stop_token_ids instead of stop")
        if params.constraint is not None and not self._tokenizer.has_text:
            raise no_tokenizer("leave out constraint")
        info = self._info
        try:
            own = params if isinstance(params, OfflineParams) else OfflineParams.of(params)
            own.check_values()
            sampling = own.to_sampling([form for word in own.words for form in self._forms_of_word(word)])
            sampling_validation.validate_sampling(
                sampling, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
            )
            info.encoder.check_sampling(sampling)
            sampling = with_thinking_marks(sampling, self._tokenizer)
            if sampling.constraint is not None:
                check_grammar(sampling.constraint)
        except InvalidArgument as error:
            raise error.inside(argument) from None
        return ModelParams(own, sampling)

    def _forms_of_word(self, word: str) -> list[list[int]]:
        """The tokens of a word, alone and after a space. Raises InvalidArgument for a word of too many tokens."""
        plain = word.lstrip()
        begins = self._tokenizer.encode("")
        forms = [self._tokenizer.encode(text)[len(begins) :] for text in (plain, f" {plain}")]
        for form in forms:
            if len(form) > limits.MAX_BANNED_SEQUENCE_TOKENS:
                most = limits.MAX_BANNED_SEQUENCE_TOKENS
                raise InvalidArgument("bad_words", f"{word!r} is {len(form)} tokens of this model; at most {most}")
        return [form for form in forms if form]

    def _request(self, prompt: OfflinePrompt, token_ids: list[int], params: ModelParams) -> OfflineRequest:
        info, (given, sampling) = self._info, params
        if prompt.pictures.placed and given.truncate_prompt_tokens is not None:
            raise InvalidArgument("truncate_prompt_tokens", "does not go with pictures; leave it out")
        if info.encoder.exists and given.truncate_prompt_tokens is not None:
            raise InvalidArgument(
                "truncate_prompt_tokens", "does not go with a model that has an encoder; leave it out"
            )
        token_ids = info.encoder.prompt_of(self._truncated(token_ids, given), prompt.argument)
        context = info.encoder.context_for(len(token_ids), info.context_tokens)
        validation.validate_prompt(token_ids, vocab_size=info.vocab_size, context_tokens=context, field=prompt.argument)
        info.pictures.check_prompt(token_ids, prompt.pictures.placed, prompt.argument)
        resolved = sampling_validation.resolve(
            sampling,
            prompt_len=len(token_ids),
            context_tokens=context,
            seed_source=lambda: self._seeds.getrandbits(63),
        )
        return OfflineRequest(
            prompt.argument,
            prompt.text,
            token_ids,
            resolved,
            lambda: self._new_stream(resolved, given.detokenize),
            decode=self._decode_token if given.detokenize else lambda _: None,
            salt=info.encoder.salt_of(prompt.salt, token_ids),
            pictures=prompt.pictures,
            num_given=info.encoder.num_given(len(token_ids)),
        )

    def _truncated(self, token_ids: list[int], params: OfflineParams) -> list[int]:
        if params.truncate_prompt_tokens is None:
            return token_ids
        if params.truncate_prompt_tokens == -1:
            return token_ids[-max(1, self._info.context_tokens - max(params.max_tokens or 1, params.min_tokens)) :]
        return token_ids[-params.truncate_prompt_tokens :]

    def _new_stream(self, params: SamplingParams, with_text: bool) -> TextStream:
        detokenizer = self._tokenizer.detokenizer(params.skip_special_tokens) if with_text else Detokenizer(NO_TEXT)
        return TextStream.of_branch(detokenizer, params, self._info.eos_token_ids)

    def _decode_token(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
