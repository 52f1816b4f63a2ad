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
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

from tqdm import tqdm

from gpu_worker.blocks.swap import CostModel
from gpu_worker.offline.interrupt_guard import InterruptGuard
from gpu_worker.offline.offline_request import CompletionOutput, OfflineRequest, RequestOutput
from gpu_worker.offline.request_builder import Message, Params, Prompt, RequestBuilder
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.sequence import Sequence as ScheduledSequence
from gpu_worker.scheduling.step import Runner
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import Workload
from gpu_worker.serving.configuration import build_runner, scheduler_config
from gpu_worker.serving.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.serving.step_times import StepTimes
from octavo import hashing
from octavo.errors import TooLarge
from octavo.ids import SequenceId
from octavo.options import closest, from_values
from octavo.record import Admission, AdmissionAnswer
from octavo.sampling import SamplingParams
from octavo.settings import WorkerSettings
from octavo.text.byte_tokenizer import ByteTokenizer
from octavo.text.tokenizer import load_tokenizer

__all__ = ["LLM", "CompletionOutput", "LLMOptions", "RequestOutput", "SamplingParams"]


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
    batch_invariant: bool
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
        self._start_anew()
        self._root = hashing.root_key(self.info.fingerprint, self.info.layout)
        seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._builder = RequestBuilder(self.info, self.tokenizer, seeds)
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
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The answers to one prompt or many, in their order. `sampling_params` is for all, or one for each.

        Everything is checked before anything runs: InvalidArgument and TooLarge name the prompt. After Ctrl-C nothing
        is left behind.
        """
        answers = self._builder.from_prompts(prompts, sampling_params)
        with self._lock:
            return self._answer(answers, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The assistant's answers to one conversation or many, each a list of {"role": …, "content": …}."""
        answers = self._builder.from_conversations(conversations, sampling_params)
        with self._lock:
            return self._answer(answers, use_tqdm)

    # Running it

    def _answer(self, answers: Sequence[OfflineRequest], use_tqdm: bool) -> list[RequestOutput]:
        with tqdm(total=len(answers), unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar:
            self._run(answers, bar)
        return [answer.output() for answer in answers]

    def _run(self, answers: Sequence[OfflineRequest], bar: tqdm) -> None:
        with InterruptGuard() as guard:
            try:
                self._check_room(answers)
                self._steps(answers, bar, guard)
            except BaseException:
                self._start_anew()  # what had not ended, and any step half done, goes with the old one
                raise

    def _check_room(self, answers: Sequence[OfflineRequest]) -> None:
        """Nothing is waiting yet, so the scheduler takes each one, unless it can never run here."""
        for answer in answers:
            sequence = self._sequence(answer)
            _expect_admitted(answer, self.scheduler.admit(sequence))
            self.scheduler.drop(sequence)

    def _steps(self, answers: Sequence[OfflineRequest], bar: tqdm, guard: InterruptGuard) -> None:
        waiting, going = deque(answers), dict[SequenceId, OfflineRequest]()
        progress = Progress(bar)
        while waiting or going:
            guard.deliver_interrupt()
            self._admit(waiting, going)
            result = self.engine.step()
            for delta in result.deltas:
                seq_id = delta.sequence.seq_id
                answer = going.get(seq_id)
                if answer is None:
                    continue
                stopped = answer.add_delta(delta)
                progress.num_tokens += len(delta.token_ids)
                if answer.ended:
                    self.scheduler.drop(delta.sequence)  # a stop string may have ended it
                    del going[seq_id]
                    bar.update()
                elif stopped:
                    self.scheduler.end_branch(delta.sequence, delta.branch_index)
            progress.show()
            if not result.num_tokens and not result.deltas:
                time.sleep(BLOCKED_ROUND_S)  # whoever is there has to wait for time to pass

    def _admit(self, waiting: deque[OfflineRequest], going: dict[SequenceId, OfflineRequest]) -> None:
        """As many as the scheduler's queue takes; a longer one would only slow its decisions down."""
        work = self.workload
        while waiting and len(work.waiting) < work.config.max_waiting:
            sequence = self._sequence(waiting[0])
            going[sequence.seq_id] = waiting.popleft()
            _expect_admitted(going[sequence.seq_id], self.scheduler.admit(sequence))

    def _sequence(self, answer: OfflineRequest) -> ScheduledSequence:
        self._num_requests += 1
        admission = Admission(
            seq_id=SequenceId(f"{self._num_requests:032x}"),
            epoch=1,
            prompt=answer.prompt_token_ids,
            sampling=answer.params,
        )
        return ScheduledSequence.from_admission(admission, root=self._root, now=time.monotonic())

    def _start_anew(self) -> None:
        """An empty workload, and an engine whose loop is never started: its steps run in the caller's thread."""
        self.workload = Workload(scheduler_config(self._settings, self.info), self.info)
        costs, budget = CostModel(), StepBudget(self.workload.config, self.info.block_size)
        self.scheduler = Scheduler(self.workload, costs, budget)
        times = StepTimes(costs, budget, self.info.bytes_per_block)
        self.engine = Engine(self.scheduler, self.runner, times, on_result=lambda _: None)


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


def _expect_admitted(request: OfflineRequest, answer: AdmissionAnswer) -> None:
    if answer.failure is not None:
        raise TooLarge(f"{request.place}: {answer.failure.message}")
