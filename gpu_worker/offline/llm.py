"""Offline use: prompts in, outputs out, by the service's own scheduler and engine in the caller's thread.

    llm = LLM("smollm2")
    for output in llm.generate(["Gravity is"], SamplingParams(temperature=0, max_tokens=20)):
        print(output.outputs[0].text)

Every prompt is checked before the first step runs, so a mistake in one of many prompts is found at once. Arguments and
outputs have vLLM's names, so that a program written for vLLM needs only another import.
"""

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

from tqdm import tqdm

from gpu_worker.engine.configuration import adapter_bytes, build_draft_model, build_runner, scheduler_config
from gpu_worker.models.checkpoint.locate import locate
from gpu_worker.offline.absent import (
    CALL_ARGUMENTS,
    CHAT_ARGUMENTS,
    METHODS,
    POOLING_ARGUMENTS,
    is_generating,
    refuse_absent,
)
from gpu_worker.offline.conversations import ChatOptions, Conversations
from gpu_worker.offline.llm_options import LLMOptions, worker_settings
from gpu_worker.offline.lora_request import LoraArgument, read_refs
from gpu_worker.offline.offline_engine import InterruptGuard, OfflineEngine
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.offline.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from gpu_worker.offline.params import BeamSearchParams, OfflineParams
from gpu_worker.offline.pooling.embedder import Embedder
from gpu_worker.offline.pooling.outputs import EmbeddingRequestOutput, OfflinePoolingParams, ScoringRequestOutput
from gpu_worker.offline.prompts import PromptArgument, read_prompts
from gpu_worker.offline.request_builder import ParamsArgument, RequestBuilder
from gpu_worker.steps.runner import Runner
from octavo.request.errors import InvalidArgument, NotFound, Unimplemented
from octavo.text.tokenizers import byte_tokenizer
from octavo.text.tokenizers.tokenizer import open_tokenizer


def load_transformers_tokenizer(path: str) -> Any:
    """The tokenizer in a folder or in a GGUF file. It runs no code of the model, and uses no network.

    Raises Unimplemented if transformers cannot read it; LLM.tokenizer may work all the same.
    """
    from transformers import AutoTokenizer

    file = Path(path)
    folder, more = (file, {}) if file.is_dir() else (file.parent, {"gguf_file": file.name})
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **more)
    except Exception as error:  # the package raises whatever the file makes it raise
        raise Unimplemented(
            f"get_tokenizer: transformers cannot read {file.name}: {error}; use LLM.tokenizer"
        ) from error


class CallOptions(TypedDict, total=False):
    """Arguments of vLLM's methods that octavo does not have: only None passes."""

    prompt_adapter_request: None
    guided_options_request: None


class PoolingCallOptions(CallOptions, total=False):
    """Arguments of vLLM's `embed` and `score` that octavo does not have: only None passes."""

    lora_request: None


class ChatCallOptions(CallOptions, total=False):
    """Arguments of vLLM's `chat` that octavo does not have: only None passes."""

    chat_template: None
    chat_template_content_format: str
    tool_choice: str


class LLM:
    """A model and an engine for it. It runs one call at a time: a call from another thread waits."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        tokenizer: str | None = None,
        seed: int | None = None,
        runner: Runner | str | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        """Loads `model`, which is smollm2, a directory, a GGUF file or a hub name; or uses a `runner` that exists.

        vLLM's names of runners mean a kind of model: "auto", "generate" and "pooling" are one here.

        `tokenizer` is such a name, too; None is the model's own. Requests without a seed of their own draw one from
        `seed`: the same calls in the same order give the same outputs. Raises SettingsError, which is a ValueError, if
        an option cannot be used, and Unimplemented for an argument of vLLM that octavo does not have.
        """
        self._settings = worker_settings(model, options)
        path = _tokenizer_path(tokenizer)
        self.runner = build_runner(self._settings) if is_generating(runner) else cast("Runner", runner)
        self.info = self.runner.info
        path = path or self.info.tokenizer
        self.tokenizer = open_tokenizer(path)
        self._tokenizer_path = path
        self._transformers_tokenizer: Any = None
        self._draft_model = build_draft_model(self._settings, self.info)
        config = scheduler_config(self._settings, self.info)
        room = adapter_bytes(self._settings, self.info)
        self.engine = OfflineEngine(config, self.runner, self._draft_model, room, self._settings.picture_cache_bytes)
        seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self.builder = RequestBuilder(self.info, self.tokenizer, seeds)
        self._embedder = Embedder(self.engine, self.info, self.tokenizer)
        self._lock = threading.Lock()
        self._num_outputs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the memory of the model. The LLM cannot be used after this."""
        self.runner.close()
        if self._draft_model is not None:
            self._draft_model.close()

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            raise AttributeError(f"LLM has no {name}: {METHODS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def generate(
        self,
        prompts: PromptArgument | Sequence[PromptArgument] | None = None,
        sampling_params: ParamsArgument = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoraArgument = None,
        **absent: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """The outputs of one prompt or many, in the order of the prompts.

        A prompt is a text, a list of token ids, {"prompt": …} or {"prompt_token_ids": […]}. Token ids may also come as
        `prompt_token_ids`, and `prompts` are then their texts. `sampling_params` is one
        value for all prompts, or one for each; so is `lora_request`, the adapter. `priority` has a number for each
        prompt, lower first; it needs LLM(scheduling_policy="priority"). Raises InvalidArgument or TooLarge, which name
        the prompt, before any step has run. After Ctrl-C nothing of the call is left in the engine.
        """
        refuse_absent("generate()", absent, (), CALL_ARGUMENTS)
        requests = self.builder.from_prompts(read_prompts(prompts, prompt_token_ids), sampling_params)
        self.prioritize(requests, priority)
        self.adapt(requests, lora_request)
        return self._complete(requests, use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraArgument = None,
        **absent: Unpack[ChatCallOptions],
    ) -> list[RequestOutput]:
        """The assistant's outputs for one conversation or many, each a list of {"role": …, "content": …}.

        `continue_final_message`, with add_generation_prompt=False, has the model go on with the last message. `tools`
        are functions as OpenAI's API has them; the model's template tells it of them, and a call is part of the text.
        `chat_template_kwargs` are variables of that template, such as enable_thinking. Everything else is as in
        `generate`.
        """
        refuse_absent("chat()", absent, (), CHAT_ARGUMENTS)
        options = ChatOptions.of_call(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        requests = self.builder.from_conversations(messages, sampling_params, options)
        self.adapt(requests, lora_request)
        return self._complete(requests, use_tqdm)

    def beam_search(
        self,
        prompts: PromptArgument | Sequence[PromptArgument],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoraArgument = None,
        **absent: Unpack[CallOptions],
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, in the order of the prompts. Raises as `generate` does."""
        refuse_absent("beam_search()", absent, (), CALL_ARGUMENTS)
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument("params", "must be BeamSearchParams(beam_width=…, max_tokens=…)")
        requests = self.builder.from_prompts(read_prompts(prompts), params.to_params())
        self.adapt(requests, lora_request)
        return [self._beams(output) for output in self._complete(requests, use_tqdm)]

    def embed(
        self,
        prompts: PromptArgument | Sequence[PromptArgument],
        *,
        pooling_params: OfflinePoolingParams | None = None,
        use_tqdm: bool = True,
        **absent: Unpack[PoolingCallOptions],
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in their order: its last token's hidden state, unless the model's files or
        `pooling_params` say otherwise. A text gets the end token that its model puts after texts. Raises as `generate`
        does.
        """
        refuse_absent("embed()", absent, (), POOLING_ARGUMENTS)
        asked = pooling_params or OfflinePoolingParams()
        if not isinstance(asked, OfflinePoolingParams):
            raise InvalidArgument("pooling_params", "must be PoolingParams(dimensions=…, normalize=…, pooling=…)")
        with self._running(use_tqdm) as (bar, guard):
            return self._embedder.embed(read_prompts(prompts), asked, bar, guard)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        method: str = "",
        instruction: str = "",
        use_tqdm: bool = True,
        **absent: Unpack[PoolingCallOptions],
    ) -> list[ScoringRequestOutput]:
        """A score for each pair of texts; one text of `data_1` is compared with each of `data_2`.

        The score is the cosine of their vectors ("cosine"), or, of a model that judges documents ("qwen3"), how likely
        it says that the second answers the first. `method` empty: what the model is for.
        """
        refuse_absent("score()", absent, (), POOLING_ARGUMENTS)
        left, right = _texts("data_1", data_1), _texts("data_2", data_2)
        with self._running(use_tqdm) as (bar, guard):
            return self._embedder.score(left, right, method, instruction, bar, guard)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as the package transformers has it; `LLM.tokenizer` is the one that encodes prompts."""
        if self._tokenizer_path in ("", byte_tokenizer.NAME):
            return self.tokenizer
        if self._transformers_tokenizer is None:
            self._transformers_tokenizer = load_transformers_tokenizer(self._tokenizer_path)
        return self._transformers_tokenizer

    def get_default_sampling_params(self) -> OfflineParams:
        """The parameters of a call without `sampling_params`, as an object of the caller's own.

        They are those that the model's generation_config.json recommends, unless generation_config is "off".
        """
        return self.builder.default_params()

    def reset_prefix_cache(self) -> bool:
        """Forgets the blocks of all earlier prompts. Always True: no request runs between two calls."""
        with self._lock:
            self.engine.start_anew()
        return True

    def prioritize(self, requests: Sequence[OfflineRequest], priority: Sequence[int] | None) -> None:
        """Gives each request its number. Raises InvalidArgument if numbers have no effect here."""
        if priority is None:
            return
        if len(priority) != len(requests) or not all(type(value) is int for value in priority):
            raise InvalidArgument("priority", f"must be a list with a whole number for each of {len(requests)} prompts")
        if any(priority) and self._settings.policy != "priority":
            raise InvalidArgument(
                "priority", 'has no effect by arrival; make the LLM with scheduling_policy="priority"'
            )
        for request, value in zip(requests, priority, strict=True):
            request.priority = value

    def adapt(self, requests: Sequence[OfflineRequest], given: LoraArgument) -> None:
        """Gives each request its adapter. Raises InvalidArgument, NotFound, BadModel, and Unimplemented."""
        if given is not None:
            for request, ref in zip(requests, read_refs(given, len(requests), self.engine.shelf), strict=True):
                request.adapter = ref

    def _beams(self, output: RequestOutput) -> BeamSearchOutput:
        sequences = []
        for found in output.outputs:
            tokens, logprobs = output.prompt_token_ids + found.token_ids, found.logprobs or []
            total = sum(place[token].logprob for token, place in zip(found.token_ids, logprobs, strict=True))
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            sequences.append(BeamSearchSequence(tokens, text, total, logprobs, found.finish_reason, found.stop_reason))
        return BeamSearchOutput(sequences)

    @contextmanager
    def _running(self, use_tqdm: bool) -> Iterator[tuple[tqdm, InterruptGuard]]:
        """One call at a time, with a bar of its prompts."""
        with (
            self._lock,
            tqdm(total=0, unit="prompt", dynamic_ncols=True, disable=None if use_tqdm else True) as bar,
            InterruptGuard() as guard,
        ):
            yield bar, guard

    def _complete(self, requests: Sequence[OfflineRequest], use_tqdm: bool) -> list[RequestOutput]:
        """The outputs of the requests, once all have ended. After an exception those that had not ended are dropped."""
        with self._running(use_tqdm) as (bar, guard):
            bar.total = len(requests)
            self.engine.run(requests, bar, guard)
            first = self._num_outputs
            self._num_outputs += len(requests)
        return [request.output(str(number)) for number, request in enumerate(requests, first)]


def _texts(name: str, data: str | Sequence[str]) -> list[str]:
    texts = [data] if isinstance(data, str) else list(data)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(name, "must be a text, or a list of texts")
    return texts


def _tokenizer_path(name: str | None) -> str:
    """The files of a tokenizer that is not the model's own; empty if none is named. Raises NotFound."""
    if name is None:
        return ""
    path = Path(name).expanduser()
    try:
        return str(path if path.exists() else locate(name).path)
    except NotFound as error:
        raise NotFound(f"tokenizer {name!r}: {error.message}") from None
