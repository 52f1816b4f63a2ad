"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes, for adapters below one folder."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Receive, Scope, Send

from octavo.model_files.lora_files import files_of
from octavo.net.security.trail import ADMIN, AccessTrail, Caller
from octavo.request.errors import FieldViolation, InvalidArgument, NotFound, PermissionDenied
from octavo.v1 import admin_pb2
from router.http.answers import called
from router.http.bodies.field_reader import FieldReader
from router.http.bodies.json_body import BodyReader, parse_object
from router.http.reply import Reply
from router.named.named_adapters import NamedAdapters

FIELDS = {"name": "lora_name", "source": "lora_path"}


@contextmanager
def _fields_of_body() -> Iterator[None]:
    """What is wrong with an adapter is said of the fields that the client has sent."""
    try:
        yield
    except InvalidArgument as error:
        found = [FieldViolation(FIELDS.get(field, field), what) for field, what in error.violations]
        raise InvalidArgument(*found[0], *found[1:]) from None
    except NotFound as error:
        if error.resource == "model":
            raise InvalidArgument("base_model_name", error.message.removeprefix("model: ")) from None
        raise


def _below(folder: str, path: str) -> str:
    """The folder, or the GGUF file, of an adapter that a client names.

    Raises InvalidArgument if it is elsewhere, or one of its files, once links are followed.
    """
    root = Path(folder).expanduser().resolve()
    try:
        source = (root / path).resolve()
        outside = [file.name for file in files_of(source) if not file.resolve().is_relative_to(root)]
    except (ValueError, OSError, RuntimeError) as error:  # such as a loop of links
        raise InvalidArgument("lora_path", f"is no path: {error}"[:200]) from None
    if not source.is_relative_to(root) or source == root:
        raise InvalidArgument("lora_path", f"must be a folder below {root}")
    if outside:
        raise InvalidArgument("lora_path", f"its {outside[0]} is a link to a place that is not below {root}")
    return str(source)


def _required(fields: FieldReader, name: str, what: str) -> str:
    """A text that must be there."""
    if fields.get(name) in (None, ""):
        fields.take_any(name)
        fields.refuse(name, f"is required: {what}")
    return fields.take_text(name)


@dataclass(eq=False)
class AdapterEndpoint:
    """Both paths. Whoever may call this router's HTTP may then name adapters, so a folder has to be given for it."""

    adapters: NamedAdapters
    bodies: BodyReader
    folder: str  # empty: nobody may
    trail: AccessTrail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Reply(send, called(scope)) as reply:
            if not self.folder:
                what = "adapters are added with octavo adapter, or here by a router with --adapter-folder"
                raise PermissionDenied(f"{scope['path']}: {what}")
            fields = FieldReader(parse_object(await self.bodies.read(scope, receive)))
            name = _required(fields, "lora_name", "the name that requests use as their model")
            caller = Caller.of_request(scope)
            with _fields_of_body():
                done = await (self._load if scope["path"].startswith("/v1/load") else self._unload)(
                    name, fields, caller
                )
            await reply.send_text(f"Success: LoRA adapter '{name}' {done} successfully.")

    async def _load(self, name: str, fields: FieldReader, caller: Caller) -> str:
        path = _required(fields, "lora_path", f"the adapter's folder, below {self.folder}")
        replaces = fields.take_flag("load_inplace")
        model = fields.take_text("base_model_name") or None
        fields.refuse_rest()
        fields.checks.raise_found()
        request = admin_pb2.AddAdapterRequest(name=name, source=path, model=model)
        self.trail.note_admin_call(f"{ADMIN}AddAdapter", caller, request)
        await self.adapters.refresh()
        if self.adapters.find(name) is not None and not replaces:
            raise InvalidArgument("lora_name", f"{name} is there: to replace it, send load_inplace: true")
        await self.adapters.add(name, await asyncio.to_thread(_below, self.folder, path), model)
        return "added"

    async def _unload(self, name: str, fields: FieldReader, caller: Caller) -> str:
        fields.take_ignored(["lora_int_id"])
        fields.refuse_rest()
        fields.checks.raise_found()
        request = admin_pb2.RemoveAdapterRequest(name=name)
        self.trail.note_admin_call(f"{ADMIN}RemoveAdapter", caller, request)
        await self.adapters.remove(name, "lora_name")
        return "removed"
