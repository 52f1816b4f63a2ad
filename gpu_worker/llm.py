"""Offline use: prompts in, answers out. The service's own scheduler, engine and text, in the caller's thread.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

Everything is checked before anything runs, so a long list of prompts does not fail in its middle for a typing error.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Self, TypedDict, Unpack, cast

from tqdm import tqdm

from gpu_worker.answer import Answer, CompletionOutput, RequestOutput
from gpu_worker.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.interrupts import Interrupts
from gpu_worker.plan import Runner
from gpu_worker.runners import build_runner, scheduler_config
from gpu_worker.scheduler import Admission, Scheduler
from gpu_worker.sequence import Sequence as ScheduledSequence
from octavo import hashing, validation
from octavo.errors import InvalidArgument, TooLarge
from octavo.ids import SequenceId
from octavo.options import closest, from_values
from octavo.sampling import SamplingParams
from octavo.settings import WorkerSettings
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.stop import TextStream
from octavo.text.tokenizer import load_tokenizer

__all__ = ["LLM", "CompletionOutput", "LLMOptions", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]  # text or token ids
Message = Mapping[str, str]  # {"role": ..., "content": ...}


class LLMOptions(TypedDict, total=False):
    """Settings of a worker that matter without a service; octavo.settings.WorkerSettings explains each."""

    device: str
    dtype: str
    quantization: str
    threads: int
    block_size: int
    kv_cache_dtype: str
    kv_cache_bytes: int | str
    swap_bytes: int | str
    context_tokens: int
    max_batch_tokens: int
    max_batch_sequences: int
    cuda_graphs: str
    prefix_caching: bool
    chunked_prefill: bool
    max_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_threshold: int
    preemption: str


class LLM:
    """A model and an engine for it. One call at a time; a call from another thread waits."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        seed: int | None = None,
        runner: Runner | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        """Loads `model`: smollm2, a directory, a GGUF file or a hub name. Or takes a `runner` that is there already.

        Requests without a seed of their own draw one from `seed`: the same calls in the same order give the same
        answers. Raises SettingsError if an option cannot be used.
        """
        for name in options:
            if name not in LLMOptions.__annotations__:
                raise TypeError(f"LLM has no option {name!r}{closest(name, LLMOptions.__annotations__)}")
        self._settings = from_values(WorkerSettings, {"model": model, **options})
        self.runner = runner or build_runner(self._settings)
        self.info = self.runner.info
        self.tokenizer = load_tokenizer(self.info.tokenizer) if self.info.tokenizer else ByteTokenizer()
        self.engine = self._new_engine()
        self._root = hashing.root_key(self.info.fingerprint, self.info.layout)
        self._seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._lock = threading.Lock()
        self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees what the model holds; nothing can be generated after."""
        self.runner.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The answers to one prompt or many, in their order. `sampling_params` is for all, or one for each.

        Everything is checked before anything runs: InvalidArgument and TooLarge name the prompt. After Ctrl-C nothing
        is left behind.
        """
        single = bool(prompts) and (isinstance(prompts, str) or _all_ids(prompts))
        listed = cast("Sequence[Prompt]", [prompts] if single else prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        tokens = [self._encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(listed)]
        return self._answer("prompts", texts, tokens, sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation or many, each a list of {"role": …, "content": …}."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed = cast("Sequence[Sequence[Message]]", [conversations] if single else conversations)
        tokens = [self._apply_chat(turns, f"conversations[{i}]") for i, turns in enumerate(listed)]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens]
        return self._answer("conversations", texts, tokens, sampling_params, use_tqdm)

    # What was asked

    def _encode(self, prompt: Prompt, place: str) -> list[int]:
        if _all_ids(prompt):
            return [int(token_id) for token_id in prompt]
        text = validation.validate_text(_utf8(prompt, place), place, context_tokens=self.info.context_tokens)
        return self.tokenizer.encode(text)

    def _apply_chat(self, turns: Sequence[Message], place: str) -> list[int]:
        try:
            messages = [(turn["role"], _utf8(turn["content"], place)) for turn in turns]
        except (KeyError, TypeError):
            raise InvalidArgument(place, 'must be a list of {"role": …, "content": …}') from None
        try:
            checked = validation.validate_chat(messages, context_tokens=self.info.context_tokens)
            return self.tokenizer.apply_chat([(turn["role"], turn["content"]) for turn in checked])
        except InvalidArgument as error:
            raise InvalidArgument(place, error.message) from None

    def _answer(
        self,
        name: str,
        texts: Sequence[str | None],
        tokens: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._lock:
            params = self._params(sampling_params, len(tokens))
            answers = [
                self._request(f"{name}[{i}]", text, token_ids, own)
                for i, (text, token_ids, own) in enumerate(zip(texts, tokens, params, strict=True))
            ]
            with tqdm(total=len(answers), unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar:
                self._run(answers, bar)
            return [answer.output() for answer in answers]

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """One for each prompt, validated."""
        if given is None or isinstance(given, SamplingParams):
            shared = given or SamplingParams()
            self._validate(shared, "sampling_params")
            return [shared] * count
        if len(given) != count:
            raise InvalidArgument("sampling_params", f"{len(given)} for {count} prompts; give one, or one for each")
        for i, params in enumerate(given):
            self._validate(params, f"sampling_params[{i}]")
        return list(given)

    def _validate(self, params: SamplingParams, place: str) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(place, "must be SamplingParams")
        info = self.info
        try:
            validation.validate_sampling(
                params,
                vocab_size=info.vocab_size,
                context_tokens=info.context_tokens,
                eos_token_ids=info.eos_token_ids,
            )
        except InvalidArgument as error:
            raise InvalidArgument(f"{place}.{error.field}", error.message.removeprefix(f"{error.field}: ")) from None

    def _request(self, place: str, text: str | None, token_ids: list[int], params: SamplingParams) -> Answer:
        """A request that has passed every check."""
        info = self.info
        try:
            validation.validate_prompt(
                token_ids, params, vocab_size=info.vocab_size, context_tokens=info.context_tokens, field=place
            )
        except InvalidArgument as error:
            raise (error if error.field == place else InvalidArgument(place, error.message)) from None
        resolved = validation.resolve(
            params,
            prompt_len=len(token_ids),
            context_tokens=info.context_tokens,
            seed_source=lambda: self._seeds.getrandbits(63),
        )
        return Answer(place, text, token_ids, resolved, lambda: self._new_stream(resolved))

    # Running it

    def _run(self, answers: Sequence[Answer], bar: tqdm) -> None:
        with Interrupts() as interrupts:
            try:
                self._check_room(answers)
                self._steps(answers, bar, interrupts)
            except BaseException:
                self.engine = self._new_engine()  # what had not ended, and any step half done, goes with the old one
                raise

    def _check_room(self, answers: Sequence[Answer]) -> None:
        """Nothing is waiting yet, so the scheduler takes each one, unless it can never run here."""
        scheduler = self.engine.scheduler
        for answer in answers:
            sequence = self._sequence(answer)
            _check(answer, scheduler.admit(sequence))
            scheduler.drop(sequence.seq_id)

    def _steps(self, answers: Sequence[Answer], bar: tqdm, interrupts: Interrupts) -> None:
        waiting, going = deque(answers), dict[SequenceId, Answer]()
        progress = Progress(bar)
        while waiting or going:
            interrupts.check()
            self._admit(waiting, going)
            result = self.engine.step()
            for delta in result.deltas:
                seq_id = delta.sequence.seq_id
                answer = going.get(seq_id)
                if answer is None:
                    continue
                stopped = answer.take(delta)
                progress.num_tokens += len(delta.token_ids)
                if answer.ended:
                    self.engine.scheduler.drop(seq_id)  # a stop string may have ended it
                    del going[seq_id]
                    bar.update()
                elif stopped:
                    self.engine.scheduler.end_branch(seq_id, delta.branch_index)
            progress.show()
            if not result.num_tokens and not result.deltas:
                time.sleep(BLOCKED_ROUND_S)  # whoever is there has to wait for time to pass

    def _admit(self, waiting: deque[Answer], going: dict[SequenceId, Answer]) -> None:
        """As many as the scheduler's queue takes; a longer one would only slow its decisions down."""
        scheduler = self.engine.scheduler
        while waiting and len(scheduler.workload.waiting) < scheduler.config.max_waiting:
            sequence = self._sequence(waiting[0])
            going[sequence.seq_id] = waiting.popleft()
            _check(going[sequence.seq_id], scheduler.admit(sequence))

    def _sequence(self, answer: Answer) -> ScheduledSequence:
        self._num_requests += 1
        return ScheduledSequence.from_admission(
            seq_id=SequenceId(f"{self._num_requests:032x}"),
            epoch=1,
            prompt=answer.prompt_token_ids,
            params=answer.params,
            root=self._root,
            arrival=time.monotonic(),
        )

    def _new_stream(self, params: SamplingParams) -> TextStream:
        return TextStream.of_branch(
            self.tokenizer.detokenizer(params.skip_special_tokens), params, self.info.eos_token_ids
        )

    def _new_engine(self) -> Engine:
        """Never started: its steps run in the caller's thread."""
        scheduler = Scheduler(scheduler_config(self._settings, self.info), self.info)
        return Engine(scheduler, self.runner, on_result=lambda _: None)


class Progress:
    """Tokens per second, beside the bar of prompts."""

    def __init__(self, bar: tqdm) -> None:
        self.num_tokens = 0
        self._bar = bar
        self._began = time.perf_counter()
        self._shown = self._began

    def show(self) -> None:
        now = time.perf_counter()
        if now - self._shown >= 0.1:
            self._shown = now
            self._bar.set_postfix_str(f"{self.num_tokens / (now - self._began):.1f} tokens/s")


def _check(answer: Answer, admission: Admission) -> None:
    if not admission.ok:
        raise TooLarge(f"{answer.place}: {admission.message}")


def _all_ids(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return all(isinstance(item, Integral) for item in value)


def _utf8(text: object, place: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidArgument(place, f"a {type(text).__name__} is neither text nor a list of token ids")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(place, f"has no UTF-8 form at character {error.start}") from None
