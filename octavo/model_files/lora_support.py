"""Which low-rank adapters a model takes: a worker knows it, and a router that has been told refuses others by name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from octavo.model_files.lora_files import LoraFiles
from octavo.model_files.lora_tensors import LoraMatrix
from octavo.request.errors import BadModel, ServingError, TooLarge, Unimplemented

MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSupport:
    """What one worker takes. By default nothing is known of it, and nothing is refused."""

    refusal: str = ""  # why it takes none
    num_layers: int = 0  # 0: nothing is known of the model's shapes
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # outputs and inputs of each module
    expert_layers: Collection[int] = ()  # those that have experts in the place of an MLP
    max_bytes: int = 0  # of an adapter's numbers; 0: not known

    @property
    def modules(self) -> list[str]:
        """Those that every layer or some layer takes."""
        return [name for name in self.shapes if name not in MLP or len(self.expert_layers) < self.num_layers]

    def check_files(self, files: LoraFiles) -> None:
        """Raises Unimplemented, BadModel or TooLarge, with the tensor or the setting, for one that cannot run there."""
        if self.refusal:
            raise Unimplemented(self.refusal)
        if self.max_bytes and files.num_bytes > self.max_bytes:
            what = f"an adapter of {files.num_bytes} bytes does not fit {self.max_bytes}"
            raise TooLarge(f"{files.path}: {what}: give workers more with --adapter-bytes")
        if self.num_layers:
            for matrix in sorted(files.tensors, reverse=True):  # of other models most have another number of layers
                self._check_place(files, matrix)

    def _check_place(self, files: LoraFiles, matrix: LoraMatrix) -> None:
        (layer, module, side), tensor = matrix, files.tensors[matrix]
        what = f"{files.path}: tensor {tensor.name[:120]}"
        if layer >= self.num_layers:
            raise BadModel(f"{what} is of layer {layer}, and the model has {self.num_layers} layers")
        if module in MLP and layer in self.expert_layers:
            raise BadModel(f"{what} is of a layer in which the model has experts: only its attention takes adapters")
        rows, columns = self.shapes.get(module, (0, 0))
        if not rows:
            raise BadModel(f"{what} is of a module that the model does not have: it has {', '.join(self.modules)}")
        found, wanted, name = (
            (tensor.shape[1], columns, "inputs") if side == "A" else (tensor.shape[0], rows, "outputs")
        )
        if found != wanted:
            raise BadModel(f"{what} is for {found} {name}, and the model's {module} has {wanted}")


NO_LORA = LoraSupport(refusal="the model runs by a decoder that takes no adapters: those of Llama's family do")


def check_any(files: LoraFiles, supports: Collection[LoraSupport]) -> None:
    """Raises what `check_files` raises if none of the workers takes the adapter. Where none is known, it is taken."""
    refused: ServingError | None = None
    for support in supports:
        try:
            support.check_files(files)
        except ServingError as error:
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused
