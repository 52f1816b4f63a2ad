"""Decoders of the Llama family on a CPU: a whole step is one call into the extension (csrc/cpu/llama*.cpp).

`llama.LlamaDecoder` defines what a NativeLlamaDecoder computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.checkpoint.weights import CheckpointReader, ProgressCallback, SizesReader, WeightSource
from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.decoder import KeptLogits, LoadLora, OwnDecoder
from gpu_worker.models.decoders.llama import FIRST_SOURCES, LATENT_SOURCES, NO_LORA_ON_GPUS, collect, layers_of
from gpu_worker.models.decoders.lora_weights import load, support_of
from gpu_worker.models.decoders.ranks.adapter_room import AdapterRoom
from gpu_worker.models.decoders.ranks.llama_share import LlamaShare
from gpu_worker.models.decoders.ranks.place import RankPlace
from gpu_worker.models.packed.packed_file import PackedFileWriter, Place
from gpu_worker.models.packed.packed_weights import NativeMatrix, PackedWeights
from gpu_worker.models.packed.packing import GROUP_ROWS, MatrixPacker
from gpu_worker.models.packed.weight_memory import PAGE, HugePageAllocator, ScratchMemory, WeightMemory
from gpu_worker.ops import TokenBatch
from gpu_worker.ops.batch import PictureRows
from gpu_worker.ops.lora import TILE, Lora, in_tiles
from gpu_worker.ops.native_cpu import FLOATS
from octavo.model_files.lora_files import LoraFiles
from octavo.request.errors import BadModel

MAX_HEAD_DIM = 256
MAX_LATENT = 1024  # what a page holds of a token with latent attention
FEWEST_PAGES = 4  # huge ones, of an adapter: the last of them is never full


def find_obstacle(config: LlamaConfig) -> str:
    """Why the extension does not compute this model; empty if it does: its heads fill the registers.

    With latent attention each head has whole groups of rows in the matrices of keys and of values.
    """
    latent, size = config.latent, config.head_dim
    if latent and (latent.rank % GROUP_ROWS or latent.values % GROUP_ROWS):
        return (
            f"latents of {latent.rank} (kv_lora_rank) and values of {latent.values} (v_head_dim) "
            f"are not both multiples of {GROUP_ROWS}"
        )
    most = MAX_LATENT if latent else MAX_HEAD_DIM
    if size % 8 == 0 and size <= most:
        return ""
    named = "latents (kv_lora_rank and qk_rope_head_dim)" if latent else "heads (head_dim)"
    return f"{named} of {size} numbers are no multiple of 8, or more than {most}"


@dataclass(frozen=True, slots=True)
class LlamaPacking:
    """How a checkpoint becomes the weights of a NativeLlamaDecoder. `scheme` is one of packed_weights.SCHEMES."""

    source: WeightSource
    config: LlamaConfig
    dtype: torch.dtype
    scheme: str
    extension: ModuleType
    on_tensor: ProgressCallback

    def in_memory(self) -> PackedWeights:
        checkpoint, packer = self._start(HugePageAllocator())
        return PackedWeights(collect(checkpoint, packer.stack, self.config, packer.split), self.scheme)

    def sizes(self) -> list[int]:
        _, packer = self._start(ScratchMemory())
        found = collect(SizesReader(self.source, torch.float32, self.on_tensor), packer.size, self.config, packer.split)
        return [size if isinstance(size, int) else 4 * size.numel() for size in found.values()]

    def into(self, file: PackedFileWriter) -> dict[str, Place]:
        """Writes the tensors to a file, each as soon as it is packed. Where each lies, by our names."""
        checkpoint, packer = self._start(ScratchMemory())

        def matrix(names: list[str], shapes: list[tuple[int, ...]]) -> Place:
            return file.add_matrix(packer.stack(names, shapes))

        tensors = collect(checkpoint, matrix, self.config, packer.split)
        return {name: file.add_vector(x) if isinstance(x, Tensor) else x for name, x in tensors.items()}

    def _start(self, memory: WeightMemory) -> tuple[CheckpointReader, MatrixPacker]:
        checkpoint = CheckpointReader(self.source, torch.float32, self.on_tensor)
        return checkpoint, MatrixPacker(self.extension, self.source, checkpoint, self.scheme, self.dtype, memory)


class NativeLlamaDecoder(OwnDecoder):
    """A Decoder. Sums, norms and the states between layers are float32, whatever the types of weights and cache."""

    capturable = False
    batch_invariant = True

    def __init__(
        self, config: LlamaConfig, packed: PackedWeights, extension: ModuleType, place: RankPlace | None = None
    ) -> None:
        """With a `place` it computes one rank's share of the decoder, in memory of all ranks."""
        self.name = f"llama in one call ({packed.describe()})"
        self.arithmetic = packed.arithmetic()  # formats of weights, and what inputs are rounded to
        super().__init__(config)
        self.config = config
        self._extension = extension
        cos, sin = config.rope.table(config.context_tokens)
        near = () if config.near_rope is None else config.near_rope.table(config.context_tokens)
        self._near = dict(zip(("cos", "sin"), near, strict=False))
        self.rope = (cos, sin, *near)
        self._axes = config.rope.axes() if config.rope.mrope_section else None
        sizes = {
            "vocab": config.vocab_size,
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "eps": config.norm_eps,
            "scale": config.attention_scale,
            "embedding_scale": config.embedding_scale,
            "asked_inner": 0 if config.experts is None else config.experts.asked_inner,
            "gelu": config.activation == "gelu_tanh",
            "post_norms": config.post_norms,
            "latent": config.latent.sizes if config.latent else {},
            **{name: getattr(config, name) for name in ("attention_cap", "logit_cap", "sum_scale", "logit_divisor")},
        }
        share = None if place is None else LlamaShare.of(config, place)
        tensors = packed.tensors if share is None else share.cut(packed.tensors, config, extension)
        arguments = {name: x.weight if isinstance(x, NativeMatrix) else x for name, x in tensors.items()}
        argument = None
        if place is not None and share is not None:
            argument = share.extension_argument(place, extension, sizes, config)
        self._adapter_room: AdapterRoom | None = None
        if place is not None and argument is not None and place.adapter_memory is not None:
            self._adapter_room = AdapterRoom(place.adapter_memory(), extension)
            argument["loras"] = self._adapter_room.native
        self._llama = extension.Llama(
            sizes=sizes,
            embedding=arguments["embedding"],
            head=arguments.get("head", arguments["embedding"]),
            norm=arguments["norm"],
            cos=cos,
            sin=sin,
            layers=[self._layer(*each) for each in enumerate(layers_of(arguments, config.num_layers))],
            share=argument,
        )
        self._hosts = None if argument is None else argument.get("hosts")
        self._kv: tuple[Sequence[Tensor], Any] | None = None
        shared = self._llama.shared_logits
        self._kept_logits = KeptLogits(
            config.vocab_size, None if shared is None else torch.from_numpy(np.asarray(shared))
        )
        adapted = (place is None or self._adapter_room is not None) and config.latent is None
        self.load_lora: LoadLora | None = self._load_lora if adapted else None
        self.lora_support = support_of(config) if adapted or config.latent else NO_LORA_ON_GPUS

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        hidden = torch.empty((rows.shape[0], self.config.hidden_size))
        loras = batch.loras
        groups = () if loras is None else tuple((lora.native, count) for lora, count in loras.groups)
        self._llama.forward(
            *(hidden, batch.token_ids, batch.positions, batch.slots),
            *(batch.cu_q, batch.seq_lens, batch.block_tables, rows, self._layers(kv)),
            *(None if loras is None else loras.rows, groups),
            **({} if batch.pictures is None else self._shown(batch.pictures)),
        )
        return hidden

    def _shown(self, pictures: PictureRows) -> dict[str, Tensor]:
        """What pictures change of a step. Text has the angles that it has without them."""
        if self._axes is None:
            raise ValueError("this model reads no pictures")
        places = pictures.positions[self._axes].T  # of each token and pair of dimensions
        cos, sin = (table[:, : places.shape[1]].gather(0, places) for table in self.rope[:2])
        return {
            "picture_rows": pictures.rows,
            "picture_states": pictures.states.float(),
            "picture_cos": torch.cat((cos, cos), dim=1),
            "picture_sin": torch.cat((sin, sin), dim=1),
        }

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        return forwarded[first:]

    def logits(self, hidden: Tensor, wanted: Any = None) -> Tensor:
        """`wanted`: a WantedLogits of the rows; those of other hosts are then -inf but for these."""
        logits = self._kept_logits.rows(hidden.shape[0])
        self._llama.logits(logits, hidden, *(() if wanted is None else (wanted,)))
        return logits

    def serve(self, kv: Sequence[Tensor], arena: Tensor) -> None:
        """In a rank other than 0: computes its share of all that rank 0 does, until the team is broken."""
        self._llama.serve(self._layers(kv), arena)

    def mirror(self, arena: Tensor, blocks: Sequence[int]) -> None:
        """In rank 0 of several hosts, before a step: sends blocks, as they are now, to the other hosts."""
        if self._hosts is not None:
            self._hosts.mirror(arena, torch.tensor(blocks, dtype=torch.int64))

    def _load_lora(self, files: LoraFiles) -> Lora:
        lora, room = load(files, self.config), self._adapter_room

        def native(here: Callable[[Tensor], Tensor]) -> Lora:
            def weight(matrix: Tensor) -> Any:
                return self._extension.Weight(here(matrix), FLOATS[matrix.dtype], *matrix.shape)

            def tiled(b: Tensor) -> Any:
                rows, rank = b.shape
                return self._extension.Weight(here(in_tiles(b))[:, :rows], FLOATS[b.dtype], rank, rows)

            layers = [
                {
                    name: (weight(stack.a), tuple((tiled(part.b), part.first) for part in stack.parts))
                    for name, stack in layer.items()
                }
                for layer in lora.layers
            ]
            found = self._extension.Lora(lora.scale, layers)
            self._llama.check_lora(found)
            return replace(lora, native=found, layers=[])  # whose matrices lie there otherwise

        if room is not None:
            parts = [part for layer in lora.layers for stack in layer.values() for part in stack.parts]
            padding = sum(-len(part.b) % TILE * part.b[0].nbytes for part in parts)
            return room.keep(lora.num_bytes + padding, len(lora.layers), native)
        return native(_in_huge_pages() if lora.num_bytes >= FEWEST_PAGES * PAGE else Tensor.contiguous)

    def _layer(self, layer: int, tensors: dict[str, Any]) -> dict[str, Any]:
        sparse, window = self.config.sparse[layer], self.config.windows[layer]
        stacks: dict[str, list[Any]] = {name: [] for name in (*FIRST_SOURCES, *LATENT_SOURCES)}
        others = {}
        for name in sorted(tensors):  # `qkv` before `qkv.1`
            stem = name.partition(".")[0]
            if stem == "experts" or stem.startswith(("expert_", "router", "shared_")):
                continue
            if stem in stacks:
                stacks[stem].append(tensors[name])
            else:
                others[name] = tensors[name]
        return (
            others
            | {name: tuple(parts) for name, parts in stacks.items()}
            | self._experts(tensors)
            | {
                "window": window,
                "sparse": () if sparse is None else sparse.extension_arguments,
                "rotated": self.config.rotated[layer],
            }
            | (self._near if window else {})
        )

    def _experts(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The experts of a layer, as the extension takes them; none if it has none."""
        experts = self.config.experts
        if experts is None or "router" not in tensors:
            return {}

        def plain(name: str) -> tuple[Any, ...]:
            matrix = tensors[name]
            return (self._extension.Weight(matrix, "f32", *matrix.shape),)

        def parts(name: str) -> tuple[Any, ...]:
            """Two where a rank has some rows of a gate, and some of what it gates."""
            return tuple(tensors[part] for part in (name, f"{name}.1") if part in tensors)

        shared = {}
        if experts.shared_inner:
            shared = {name: parts(name) for name in ("shared_gate_up", "shared_down")}
        if experts.shared_gated:
            shared["shared_gate"] = plain("shared_gate")
        gates = [x for i in range(experts.count) for x in parts(f"experts.{i}.gate_up")]
        if len({each.inputs for each in (*gates, *shared.get("shared_gate_up", ()))}) > 1:
            raise BadModel(
                "some experts are in floats and others are not, which round their inputs differently: "
                "say --quantization none (or q8 or q4, which round all)"
            )
        vectors = ("router_bias", "router_correction", "expert_gate_up_bias", "expert_down_bias")
        settings = ("top", "sigmoid", "shares_sum_to_one", "share_scale", "groups", "top_groups", "best_per_group")
        swiglu = ("swiglu_alpha", "swiglu_limit")
        return shared | {
            **{name: tensors[name] for name in vectors if name in tensors},
            **{name: getattr(experts, name) for name in (*settings, *swiglu)},
            "router": plain("router"),
            "expert_gate_up": tuple(gates),
            "expert_down": tuple(tensors[f"experts.{i}.down"] for i in range(experts.count)),
        }

    def _layers(self, kv: Sequence[Tensor]) -> Any:
        """The extension's handle of the arena. Every step passes the same list of tensors, so the handle is kept."""
        if self._kv is None or self._kv[0] is not kv:
            self._kv = (kv, self._extension.Kv(list(kv)))
        return self._kv[1]


def _in_huge_pages() -> Callable[[Tensor], Tensor]:
    """Copies matrices into memory of their own, one after the other: a step reads all of an adapter once."""
    memory = HugePageAllocator()

    def copied(matrix: Tensor) -> Tensor:
        return memory.allocate(matrix.nbytes).view(matrix.dtype).view(matrix.shape).copy_(matrix)

    return copied
