"""`LLMEngine`: requests are added at any time, and each call of `step` makes one step in the caller's thread.

engine = LLMEngine("smollm2")
engine.add_request("a", "Gravity is", SamplingParams(max_tokens=20))
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.request_id, output.outputs[0].text)
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from gpu_worker.offline.live.held_adapters import HeldAdapters
from gpu_worker.offline.live.live_requests import LiveRequests
from gpu_worker.offline.live.new_requests import EngineArgs, NewRequests
from gpu_worker.offline.llm import LLM
from gpu_worker.offline.lora_request import LoRARequest
from gpu_worker.offline.outputs import RequestOutput
from gpu_worker.offline.prompts import PromptArgument
from gpu_worker.offline.request_builder import AnyParams


class LLMEngine:
    """A model, and an engine that the caller drives. One thread uses it."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """The arguments are those of `LLM`."""
        self.llm = LLM(model, **options)
        self._new = NewRequests(self.llm)
        self._live = LiveRequests(self.llm.engine)
        self._held = HeldAdapters(self.llm.engine)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> Self:
        return cls(engine_args.model, **engine_args.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def add_request(
        self,
        request_id: str,
        prompt: PromptArgument,
        params: AnyParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **absent: Any,
    ) -> str:
        """The id of the request, whose outputs `step` brings. Raises InvalidArgument or TooLarge."""
        request, kind = self._new.make(request_id, prompt, params, priority, lora_request, absent)
        self._live.add(request_id, request, kind)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests. They have no further output."""
        self._live.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def step(self) -> list[RequestOutput]:
        """One step: an output of each request that it brought something, if its `output_kind` has one now."""
        return self._live.step() if len(self._live) else []

    def has_unfinished_requests(self) -> bool:
        return len(self._live) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._live)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Brings an adapter into memory before a request wants it. Whether its number is new."""
        return self._held.add(lora_request, self._held.read(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Lets an adapter go when its room is needed. False: none has that number."""
        return self._held.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that were added."""
        return self._held.list()

    def pin_lora(self, lora_id: int) -> bool:
        """Has an adapter that was added stay in memory until it is removed. Raises InvalidArgument."""
        return self._held.pin(lora_id)

    def get_tokenizer(self) -> Any:
        """As that of `LLM`."""
        return self.llm.get_tokenizer()

    def close(self) -> None:
        """Frees the memory of the model."""
        self.llm.close()
