"""The engine of an LLM: the service's scheduler and step loop, in the caller's thread."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Self

from tqdm import tqdm

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.constraints.grammars import Grammars
from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.engine.command_port import CommandPort, LoopControl
from gpu_worker.engine.engine import BLOCKED_ROUND_S, Engine
from gpu_worker.engine.picture_shelf import PictureShelf
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig, StepBudget
from gpu_worker.scheduling.state.sequence import Sequence as ScheduledSequence
from gpu_worker.scheduling.state.step import StepItems
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import Runner
from octavo.pictures.picture import pack_pictures
from octavo.pictures.reader import ShownPictures
from octavo.request import hashing
from octavo.request.errors import OutOfBlocks, TooLarge
from octavo.request.ids import SequenceId
from octavo.request.record import Admission, AdmissionAnswer

Handler = Callable[[int, FrameType | None], object]


class InterruptGuard:
    """A context in which SIGINT waits for `deliver_interrupt`, which calls the handler installed before the guard.

    A second SIGINT is delivered at once. A SIGINT that still waits when the block ends is delivered there, but is lost
    if the block ends with another exception. The guard changes nothing outside the main thread, and nothing where
    SIGINT is ignored or ends the process.
    """

    def __init__(self) -> None:
        self._previous: Handler | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = previous
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if kind is None:
            self.deliver_interrupt()

    def deliver_interrupt(self) -> None:
        """Calls the handler installed before the guard if a SIGINT waits. Call it where nothing is half done."""
        if self._noted is not None and self._previous is not None:
            noted, self._noted = self._noted, None
            self._previous(*noted)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        again = self._noted is not None
        self._noted = (signum, frame)
        if again:
            self.deliver_interrupt()


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


Admitted = tuple[OfflineRequest, ScheduledSequence]


class OfflineEngine:
    """Runs requests to their ends, one list of them at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        draft_model: DraftModel | None = None,
        adapter_bytes: int = 0,
        picture_bytes: int = 0,
    ) -> None:
        """`adapter_bytes` and `picture_bytes`: how much memory low-rank adapters and encoded pictures may take."""
        self._config = config
        self._runner = runner
        self._info = runner.info
        self._draft_model = draft_model
        self._num_sequences = 0
        self.pinned_adapters: set[int] = set()  # numbers of adapters that stay, whether they are used or not
        self._grammars = Grammars(self._info)
        self.shelf = AdapterShelf(
            runner.adapters,
            adapter_bytes,
            lambda: self.workload.adapters_in_use() | self.pinned_adapters,
            runner.info.lora_support,
        )
        self.picture_shelf = PictureShelf(runner.pictures, picture_bytes, lambda: self.workload.pictures_in_use())
        self.start_anew()

    def start_anew(self) -> None:
        """Begins with an empty workload and an empty prefix cache. What has not ended is dropped."""
        self.workload = Workload(self._config, self._info)
        costs, budget = CostModel(), StepBudget(self._config, self._info.block_size)
        self.scheduler = Scheduler(self.workload, costs, budget, draft_model=self._draft_model)
        times = StepTimes(costs, budget, self._info.bytes_per_block)
        # It is never started: its steps run in the caller's thread.
        port = CommandPort(self.scheduler)
        self.loop = Engine(port, LoopControl(port), self.scheduler, self._runner, times, on_items=lambda _: None)

    def run(self, requests: Sequence[OfflineRequest], bar: tqdm, guard: InterruptGuard) -> None:
        """Runs all requests to their ends, and shows it on the bar. After an exception, it has started anew.

        Raises TooLarge, before any step, if one of them can never run here.
        """
        try:
            self._check_size(requests)
            self._run_steps(requests, bar, guard)
        except BaseException:
            self.start_anew()
            raise

    @property
    def has_room(self) -> bool:
        """Whether the scheduler's queue takes another sequence."""
        return len(self.workload.waiting) < self.workload.config.max_waiting

    def step(self) -> StepItems:
        """One step, and a pause if it brought nothing: every sequence waits for time to pass."""
        result = self.loop.step()
        if not result.num_tokens and not result.items:
            time.sleep(BLOCKED_ROUND_S)
        return result

    def admit(self, request: OfflineRequest) -> ScheduledSequence:
        """Gives a request to the scheduler, whose queue must have room. Raises TooLarge if it can never run here.

        Raises OutOfBlocks while the adapters of other requests leave no room for its own, and NotFound or BadModel if
        that one is not there any more.
        """
        sequence = self._new_sequence(request)
        _expect_admitted(request, self.scheduler.admit(sequence))
        return sequence

    def _check_size(self, requests: Sequence[OfflineRequest]) -> None:
        """Raises TooLarge if a request can never run here, by admitting each to the empty queue and dropping it."""
        for request in sorted(requests, key=lambda request: request.adapter.digest):  # each adapter is read once
            self.scheduler.drop(self.admit(request))

    def _run_steps(self, requests: Sequence[OfflineRequest], bar: tqdm, guard: InterruptGuard) -> None:
        waiting = deque(sorted(requests, key=lambda request: request.priority))
        admitted = dict[SequenceId, Admitted]()
        progress = ProgressBar(bar)
        while waiting or admitted:
            guard.deliver_interrupt()
            self._admit(waiting, admitted)
            result = self.step()
            for item in result.items:
                seq_id = item.seq_id
                if seq_id not in admitted:
                    continue
                request, sequence = admitted[seq_id]
                stopped = request.add_item(item)
                progress.num_tokens += len(item.token_ids)
                if request.ended:
                    self.scheduler.drop(sequence)  # the scheduler does not know an end by a stop string
                    del admitted[seq_id]
                    bar.update()
                elif stopped:
                    self.scheduler.end_branch(sequence, item.branch)
            progress.show()

    def _admit(
        self, waiting: deque[OfflineRequest], admitted: dict[SequenceId, tuple[OfflineRequest, ScheduledSequence]]
    ) -> None:
        """Admits as many requests as the scheduler's queue takes. The rest waits outside, where it costs nothing.

        Those whose adapter or pictures find no room are passed over, until others have ended.
        """
        passed, without_room = [], set[tuple[str, bool]]()
        while waiting and self.has_room:
            request = waiting.popleft()
            needs = (request.adapter.digest, bool(request.pictures.placed))
            if needs in without_room:
                passed.append(request)
                continue
            try:
                sequence = self.admit(request)
            except OutOfBlocks:
                without_room.add(needs)
                passed.append(request)
                continue
            admitted[sequence.seq_id] = (request, sequence)
        waiting.extendleft(reversed(passed))

    def _bring(self, digest: str, source: str) -> int:
        self.shelf.require_room(digest)
        return self.shelf.put(self.shelf.read(source, digest))

    def _bring_pictures(self, pictures: ShownPictures) -> None:
        if not pictures.placed:
            return
        self.picture_shelf.check_size(pictures.placed)
        for each in self.picture_shelf.lacking(pictures.placed):
            self.picture_shelf.require_room(each)
            self.picture_shelf.put(self.picture_shelf.memory().encode(each, pictures.pixels[each.digest]))
        if not self.picture_shelf.has_all(pictures.placed):  # those of others leave room for some of them only
            raise OutOfBlocks("pictures of other requests fill the memory for them")

    def _new_sequence(self, request: OfflineRequest) -> ScheduledSequence:
        self._num_sequences += 1
        admission = Admission(
            seq_id=SequenceId(f"{self._num_sequences:032x}"),
            epoch=1,
            prompt=request.prompt_token_ids,
            sampling=request.params,
            priority=request.priority,
            pictures=pack_pictures(request.pictures.placed),
        )
        info, (digest, source) = self._info, request.adapter
        root = hashing.root_key(info.fingerprint, info.layout, digest, request.salt, info.numerics)
        sequence = ScheduledSequence.from_admission(admission, root=root, now=time.monotonic())
        if digest:
            self.shelf.require_turn(digest)
            sequence.adapter = self.shelf.find(digest) or self._bring(digest, source)
        self._bring_pictures(request.pictures)
        sequence.beam_text = request.new_beam_text()
        if request.params.constraint is not None:
            sequence.grammar = self._grammars.compile(request.params.constraint)
        return sequence


def _expect_admitted(request: OfflineRequest, answer: AdmissionAnswer) -> None:
    """Raises TooLarge after a refusal. It can only be NEVER: the queue has room, and every sequence id is new."""
    if answer.failure is not None:
        raise TooLarge(f"{request.argument}: {answer.failure.message}")
