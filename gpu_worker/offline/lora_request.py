"""Which low-rank adapter a prompt runs with, by vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpu_worker.engine.adapter_shelf import AdapterShelf
from gpu_worker.offline.absent import LORA_ARGUMENTS, refusing
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import InvalidArgument


@refusing("LoRARequest", LORA_ARGUMENTS)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in the folder `lora_path`. Name and number are the caller's: what counts is what the files hold."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class AdapterRef(NamedTuple):
    """An adapter as it was when it was asked for."""

    digest: str = ""  # empty: none
    source: str = ""  # its folder


LoraArgument = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or one for each


def read_refs(given: LoraArgument, count: int, shelf: AdapterShelf) -> list[AdapterRef]:
    """The adapter of each of `count` prompts. Raises InvalidArgument, NotFound, BadModel or TooLarge, and
    Unimplemented where none runs.
    """
    listed = [given] * count if given is None or isinstance(given, LoRARequest) else given
    if not isinstance(listed, Sequence) or not all(each is None or isinstance(each, LoRARequest) for each in listed):
        raise InvalidArgument("lora_request", "must be LoRARequest(name, id, path), or a list with one for each prompt")
    if len(listed) != count:
        raise InvalidArgument("lora_request", f"{len(listed)} for {count} prompts; give one, or one for each")
    paths = {each.lora_path for each in listed if each is not None}
    if paths:
        shelf.memory()
    refs = {path: _ref(Path(path).expanduser(), shelf.max_file_bytes) for path in paths}
    return [AdapterRef() if each is None else refs[each.lora_path] for each in listed]


def _ref(path: Path, max_bytes: int) -> AdapterRef:
    return AdapterRef(read_lora(path, max_bytes=max_bytes).digest, str(path))
