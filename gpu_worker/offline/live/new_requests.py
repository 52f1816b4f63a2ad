"""What engines take: their own arguments, and those of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.offline.absent import CALL_ARGUMENTS, refuse_absent
from gpu_worker.offline.llm import LLM
from gpu_worker.offline.lora_request import LoRARequest
from gpu_worker.offline.offline_request import OfflineRequest
from gpu_worker.offline.outputs import RequestOutputKind
from gpu_worker.offline.params import OfflineParams
from gpu_worker.offline.prompts import PromptArgument, read_prompts
from gpu_worker.offline.request_builder import AnyParams
from octavo.request.errors import InvalidArgument


@dataclass(init=False, slots=True)
class EngineArgs:
    """The arguments of an engine, which are those of `LLM`. They are checked when the engine is made."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.model = model
        self.options = options


class NewRequests:
    """Makes requests of an LLM's model. One thread uses it at a time: seeds are drawn in the order of the calls."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def make(
        self,
        request_id: str,
        prompt: PromptArgument,
        params: AnyParams | None,
        priority: int,
        lora_request: LoRARequest | None,
        absent: Mapping[str, object],
    ) -> tuple[OfflineRequest, RequestOutputKind]:
        """A request, and what its outputs have. Raises InvalidArgument, and Unimplemented for what octavo lacks."""
        refuse_absent("the request", absent, (), CALL_ARGUMENTS)
        if not isinstance(request_id, str) or not request_id:
            raise InvalidArgument("request_id", "must be a text that is not empty")
        prompts = read_prompts(prompt)
        if len(prompts) != 1:
            raise InvalidArgument("prompt", f"{len(prompts)} prompts: a request has one")
        (request,) = self._llm.builder.from_prompts(prompts, params)
        self._llm.prioritize([request], [priority])
        self._llm.adapt([request], lora_request)
        kind = params.output_kind if isinstance(params, OfflineParams) else RequestOutputKind.CUMULATIVE
        return request, RequestOutputKind(kind)
