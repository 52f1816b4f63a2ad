"""`AsyncLLM`: requests of an event loop, and steps in a thread of the engine's own.

llm = AsyncLLM("smollm2")
async for output in llm.generate("Gravity is", SamplingParams(max_tokens=20), request_id="a"):
    print(output.outputs[0].text)
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from gpu_worker.offline.live.engine_thread import EngineThread
from gpu_worker.offline.live.held_adapters import HeldAdapters
from gpu_worker.offline.live.mailbox import Mailbox
from gpu_worker.offline.live.new_requests import EngineArgs, NewRequests
from gpu_worker.offline.llm import LLM
from gpu_worker.offline.lora_request import LoRARequest
from gpu_worker.offline.outputs import RequestOutput
from gpu_worker.offline.params import OfflineParams
from gpu_worker.offline.prompts import PromptArgument
from gpu_worker.offline.request_builder import AnyParams
from octavo.request.errors import InvalidArgument

T = TypeVar("T")


class AsyncLLM:
    """A model and its engine's thread. Its methods are called on event loops, of which there may be several."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """The arguments are those of `LLM`. The model is loaded when this returns."""
        self.llm = LLM(model, **options)
        self._new = NewRequests(self.llm)
        self._thread = EngineThread(self.llm.engine)
        self._held = HeldAdapters(self.llm.engine)
        # Also where the program ends without `shutdown`: no step may run while the interpreter is taken down.
        self._end = weakref.finalize(self, _end, self._thread, self.llm)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *absent: object, **also_absent: object) -> Self:
        return cls(engine_args.model, **engine_args.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def generate(
        self,
        prompt: PromptArgument,
        sampling_params: AnyParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **absent: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as steps bring them, by `output_kind` of its parameters.

        A reader that is slower than the engine gets several steps' worth at once. If it leaves, the request is aborted.
        Raises InvalidArgument or TooLarge before the first output, and RunnerFailed if the engine has ended.
        """
        mailbox = await self.add_request(
            request_id, prompt, sampling_params, priority=priority, lora_request=lora_request, **absent
        )
        try:
            while True:
                output = await mailbox.get()
                yield output
                if output.finished:
                    return
        finally:
            if not mailbox.ended:
                self._thread.abort([request_id], mailbox)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptArgument,
        params: AnyParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **absent: Any,
    ) -> Mailbox:
        """Begins a request, whose outputs `get` of what this returns brings, one after the other."""
        request, kind = self._new.make(request_id, prompt, params, priority, lora_request, absent)
        mailbox = Mailbox(asyncio.get_running_loop(), kind)
        adding = asyncio.wrap_future(self._thread.add(request_id, request, mailbox))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            self._thread.abort([request_id], mailbox)  # it comes after the addition
            raise
        return mailbox

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their readers get what there is so far, with the finish reason "abort"."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if not all(isinstance(each, str) for each in request_ids):
            raise InvalidArgument("request_id", "must be a text, or texts")
        self._thread.abort(request_ids)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Brings an adapter into memory, so that its first request need not wait. Whether its number is new.

        Raises InvalidArgument, NotFound, BadModel or TooLarge, Unimplemented where none runs, NoAdapterRoom where those
        in use leave no room, and RunnerFailed.
        """
        adapter = await asyncio.to_thread(self._held.read, lora_request)
        return await self._call(lambda: self._held.add(lora_request, adapter))

    async def remove_lora(self, lora_id: int) -> bool:
        """Lets an adapter go when its room is needed. False: none has that number."""
        return await self._call(lambda: self._held.remove(lora_id))

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters that were added."""
        return await self._call(self._held.list)

    async def pin_lora(self, lora_id: int) -> bool:
        """Has an adapter that was added stay in memory until it is removed. Raises InvalidArgument."""
        return await self._call(lambda: self._held.pin(lora_id))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    @property
    def is_running(self) -> bool:
        return self._thread.error is None and not self._thread.stopped

    @property
    def errored(self) -> bool:
        """Whether the engine has ended by itself."""
        return self._thread.error is not None

    async def check_health(self) -> None:
        """Raises RunnerFailed if the engine has ended."""
        self._thread.check_running()

    async def get_tokenizer(self) -> Any:
        """As that of `LLM`."""
        return await asyncio.to_thread(self.llm.get_tokenizer)

    def get_default_sampling_params(self) -> OfflineParams:
        """The parameters of a request without any."""
        return self.llm.get_default_sampling_params()

    def shutdown(self) -> None:
        """Ends the step in flight and the requests, and frees the memory of the model.

        It may be called again, and is to be where a step takes longer than half a minute: nothing is freed under it.
        """
        if self._thread.stop() and self._end.detach():
            self.llm.close()


def _end(thread: EngineThread, llm: LLM) -> None:
    if thread.stop():
        llm.close()
