"""Low-rank adapters that a program brings into memory before requests want them, by vLLM's names and numbers."""

from pathlib import Path

from gpu_worker.offline.lora_request import LoRARequest
from gpu_worker.offline.offline_engine import OfflineEngine
from gpu_worker.steps.runner import ReadAdapter
from octavo.request.errors import InvalidArgument


class HeldAdapters:
    """Those that were added. Except for `read`, one thread at a time: it is the engine's."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._numbers: dict[int, int] = {}  # the engine's, by the caller's

    def read(self, request: object) -> ReadAdapter:
        """Reads an adapter; any thread may. Raises InvalidArgument, NotFound, BadModel, TooLarge or Unimplemented."""
        if not isinstance(request, LoRARequest):
            raise InvalidArgument("lora_request", "must be LoRARequest(name, id, path)")
        return self._engine.shelf.read(str(Path(request.lora_path).expanduser()))

    def add(self, request: LoRARequest, adapter: ReadAdapter) -> bool:
        """Whether its number is new. It goes when others need the room. Raises NoAdapterRoom."""
        is_new = request.lora_int_id not in self._numbers
        self.remove(request.lora_int_id)
        self._numbers[request.lora_int_id] = self._engine.shelf.put(adapter)
        return is_new

    def remove(self, lora_id: int) -> bool:
        """Forgets a number: the adapter goes when the room is needed. False: it is not there."""
        number = self._numbers.pop(lora_id, None)
        if number not in self._numbers.values():
            self._engine.pinned_adapters.discard(number or 0)
        return number is not None

    def pin(self, lora_id: int) -> bool:
        """Has the adapter stay until it is removed. Raises InvalidArgument if it was not added, or has gone."""
        number = self._numbers.get(lora_id, 0)
        if not self._engine.shelf.has(number):
            raise InvalidArgument("lora_id", f"{lora_id} is not in memory: add_lora brings it there")
        self._engine.pinned_adapters.add(number)
        return True

    def list(self) -> set[int]:
        return set(self._numbers)
