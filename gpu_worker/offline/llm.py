"""Offline use: prompts in, outputs out, by the service's own scheduler and engine in the caller's thread.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

Every prompt is checked before the first step runs, so a mistake in one of many prompts is found at once.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

from tqdm import tqdm

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.engine.configuration import build_runner, scheduler_config
from gpu_worker.engine.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.offline.interrupt_guard import InterruptGuard
from gpu_worker.offline.offline_request import CompletionOutput, OfflineRequest, RequestOutput
from gpu_worker.offline.request_builder import ChatTurn, ParamsArgument, PromptArgument, RequestBuilder
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.sequence import Sequence as ScheduledSequence
from gpu_worker.scheduling.step import Runner
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import Workload
from octavo import hashing
from octavo.errors import TooLarge
from octavo.ids import SequenceId
from octavo.options import closest
from octavo.record import Admission, AdmissionAnswer
from octavo.sampling import SamplingParams
from octavo.setting_sources import from_values
from octavo.settings import WorkerSettings
from octavo.text.tokenizer import open_tokenizer

__all__ = ["LLM", "CompletionOutput", "LLMOptions", "RequestOutput", "SamplingParams"]


class LLMOptions(TypedDict, total=False):
    """The settings of a worker that matter without a service. octavo.settings.WorkerSettings explains each."""

    device: str
    dtype: str
    quantization: str
    threads: int
    block_size: int
    kv_cache_dtype: str
    kv_cache_bytes: int | str
    swap_bytes: int | str
    context_tokens: int
    generation_config: str
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
    """A model and an engine for it. It runs one call at a time: a call from another thread waits."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        seed: int | None = None,
        runner: Runner | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        """Loads `model`, which is smollm2, a directory, a GGUF file or a hub name; or uses a `runner` that exists.

        Requests without a seed of their own draw one from `seed`: the same calls in the same order give the same
        outputs. Raises SettingsError if an option cannot be used.
        """
        for name in options:
            if name not in LLMOptions.__annotations__:
                raise TypeError(f"LLM has no option {name!r}{closest(name, LLMOptions.__annotations__)}")
        self._settings = from_values(WorkerSettings, {"model": model, **options})
        self.runner = runner or build_runner(self._settings)
        self.info = self.runner.info
        self.tokenizer = open_tokenizer(self.info.tokenizer)
        self._start_anew()
        self._root = hashing.root_key(self.info.fingerprint, self.info.layout)
        seeds: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._builder = RequestBuilder(self.info, self.tokenizer, seeds)
        self._lock = threading.Lock()
        self._num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of prompts that come without any: those that the model recommends."""
        return self._builder.default_params

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the memory of the model. The LLM cannot be used after this."""
        self.runner.close()

    def generate(
        self,
        prompts: PromptArgument | Sequence[PromptArgument],
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The outputs of one prompt or many, in the order of the prompts.

        `sampling_params` is one value for all prompts, or one for each. Raises InvalidArgument or TooLarge, which name
        the prompt, before any step has run. After Ctrl-C nothing of the call is left in the engine.
        """
        return self._complete(self._builder.from_prompts(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        conversations: Sequence[ChatTurn] | Sequence[Sequence[ChatTurn]],
        sampling_params: ParamsArgument = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The assistant's outputs for one conversation or many, each a list of {"role": …, "content": …}.

        Everything else is as in `generate`.
        """
        return self._complete(self._builder.from_conversations(conversations, sampling_params), use_tqdm)

    def _complete(self, requests: Sequence[OfflineRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Runs all requests to their ends.

        After an exception the scheduler and the engine are replaced, and requests that had not ended are dropped.
        """
        with (
            self._lock,
            tqdm(total=len(requests), unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar,
            InterruptGuard() as guard,
        ):
            try:
                self._check_size(requests)
                self._run_steps(requests, bar, guard)
            except BaseException:
                self._start_anew()
                raise
        return [request.output() for request in requests]

    def _check_size(self, requests: Sequence[OfflineRequest]) -> None:
        """Raises TooLarge if a request can never run here, by admitting each to the empty queue and dropping it."""
        for request in requests:
            sequence = self._new_sequence(request)
            _expect_admitted(request, self.scheduler.admit(sequence))
            self.scheduler.drop(sequence)

    def _run_steps(self, requests: Sequence[OfflineRequest], bar: tqdm, guard: InterruptGuard) -> None:
        waiting, admitted = deque(requests), dict[SequenceId, OfflineRequest]()
        progress = ProgressBar(bar)
        while waiting or admitted:
            guard.deliver_interrupt()
            self._admit(waiting, admitted)
            result = self.engine.step()
            for delta in result.deltas:
                seq_id = delta.sequence.seq_id
                request = admitted.get(seq_id)
                if request is None:
                    continue
                stopped = request.add_delta(delta)
                progress.num_tokens += len(delta.token_ids)
                if request.ended:
                    self.scheduler.drop(delta.sequence)  # the scheduler does not know an end by a stop string
                    del admitted[seq_id]
                    bar.update()
                elif stopped:
                    self.scheduler.end_branch(delta.sequence, delta.branch_index)
            progress.show()
            if not result.num_tokens and not result.deltas:
                time.sleep(BLOCKED_ROUND_S)  # every sequence waits for time to pass

    def _admit(self, waiting: deque[OfflineRequest], admitted: dict[SequenceId, OfflineRequest]) -> None:
        """Admits as many requests as the scheduler's queue takes. The rest waits outside, where it costs nothing."""
        work = self.workload
        while waiting and len(work.waiting) < work.config.max_waiting:
            request = waiting.popleft()
            sequence = self._new_sequence(request)
            admitted[sequence.seq_id] = request
            _expect_admitted(request, self.scheduler.admit(sequence))

    def _new_sequence(self, request: OfflineRequest) -> ScheduledSequence:
        self._num_requests += 1
        admission = Admission(
            seq_id=SequenceId(f"{self._num_requests:032x}"),
            epoch=1,
            prompt=request.prompt_token_ids,
            sampling=request.params,
        )
        return ScheduledSequence.from_admission(admission, root=self._root, now=time.monotonic())

    def _start_anew(self) -> None:
        """Begins with an empty workload. The engine is never started: its steps run in the caller's thread."""
        self.workload = Workload(scheduler_config(self._settings, self.info), self.info)
        costs, budget = CostModel(), StepBudget(self.workload.config, self.info.block_size)
        self.scheduler = Scheduler(self.workload, costs, budget)
        times = StepTimes(costs, budget, self.info.bytes_per_block)
        self.engine = Engine(self.scheduler, self.runner, times, on_deltas=lambda _: None)


class ProgressBar:
    """The bar of prompts, with the tokens per second beside it."""

    def __init__(self, bar: tqdm) -> None:
        self.num_tokens = 0
        self._bar = bar
        self._began = time.perf_counter()
        self._shown = self._began

    def show(self) -> None:
        """Writes the rate, at most ten times a second."""
        now = time.perf_counter()
        if now - self._shown >= 0.1:
            self._shown = now
            self._bar.set_postfix_str(f"{self.num_tokens / (now - self._began):.1f} tokens/s")


def _expect_admitted(request: OfflineRequest, answer: AdmissionAnswer) -> None:
    """Raises TooLarge after a refusal. It can only be NEVER: the queue has room, and every sequence id is new."""
    if answer.failure is not None:
        raise TooLarge(f"{request.argument}: {answer.failure.message}")
