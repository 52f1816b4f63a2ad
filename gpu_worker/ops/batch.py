"""What ops are given: the tokens of a step as flat tensors, blocks of each sequence, and options of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from gpu_worker.ops.lora import LoraRows

ALIGNMENT = 16  # bytes; each array begins at a multiple of it


class ArrayLayout:
    """Where each of several arrays lies in one piece of memory."""

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._forms = forms
        self.starts: list[int] = []  # bytes
        end = 0
        for shape, dtype in forms:
            self.starts.append(end)
            end += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    def views(self, memory: Tensor) -> list[Tensor]:
        """The arrays as views of `memory`, uint8 [num_bytes]."""
        return [
            memory[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(self.starts, self._forms, strict=True)
        ]


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory of zeros that `device` can copy from by itself."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def packed(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`, by one copy from one piece of host memory.

    The host memory may be dropped at once: torch keeps it until the copy is done.
    """
    layout = ArrayLayout([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    host = staging(layout.num_bytes, device)
    for view, tensor in zip(layout.views(host), tensors, strict=True):
        view.copy_(tensor)
    return layout.views(host.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class BlockSparsePattern:
    """Which keys a query sees in block-sparse attention, as vLLM defines it.

    A query sees the keys of the last `local_blocks` blocks, its own included, and of every `vert_stride`-th block.
    Which block is the first of those depends on the head.
    """

    local_blocks: int
    vert_stride: int  # more than 1
    block_size: int = 64  # keys
    head_step: int = 0  # blocks by which the pattern shifts from head to head; negative: between key-value heads

    @property
    def extension_arguments(self) -> tuple[int, int, int, int, int]:
        """The numbers that the extension takes. The last one is the rank among workers that share the heads."""
        return self.local_blocks, self.vert_stride, self.block_size, self.head_step, 0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """How attention scores keys. One object per kind of layer, kept from step to step."""

    scale: float
    window: int = 0  # how many keys a query sees, its own included; 0: all keys before it
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    alibi: Tensor | None = None  # float32 [num_heads]: slope * (key position - query position) is added
    sinks: Tensor | None = None  # float32 [num_heads]: a score without a value that takes part in the softmax
    sparse: BlockSparsePattern | None = None  # None: a query sees all keys that the window lets it see


class SwapTicket(Protocol):
    """Stands for copies of blocks that are under way between two arenas.

    Copies are made in the order of the calls that began them. Both arenas live until the copies are done.
    """

    def is_done(self) -> bool:
        """Whether the copies are done. Does not wait."""
        ...

    def wait(self) -> None:
        """Waits until the copies are done."""
        ...

    def let_device_wait(self) -> None:
        """Makes work queued on the device after this call wait for the copies. The calling thread does not wait."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """The tokens of a step that show pictures, and where all of its tokens stand for a model that reads pictures."""

    rows: Tensor  # int64 [num_rows]: tokens of the batch
    states: Tensor  # [num_rows, (1 + n) hidden_size]: what stands for their embeddings, and is added after n layers
    positions: Tensor  # int64 [3, num_tokens]: of time, row and column


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Which tokens of a step an encoder has read, and what it gave for them."""

    lengths: list[int]  # of each sequence: how many of its leading tokens the encoder reads
    states: Tensor  # [num_rows, size]: what it gave for those of them that the step has
    # Of each sequence, where a model asks: the tokens of its decoder up to the end of its chunk, and how many of them
    # are of the prompt. Empty: the branch may write one token alone, so that nothing else is to be kept out.
    decoded: Sequence[tuple[Sequence[int], int]] = ()


@dataclass(slots=True, eq=False)
class TokenBatch:
    """The tokens of a step. A sequence is here one chunk of the plan; its tokens follow each other without padding.

    Query j of sequence i is token cu_q[i] + j. Its position is kv_lens[i] - q_lens[i] + j, and it sees the keys of
    positions up to its own. The keys and values of position p lie in block block_tables[i, p // block_size]. Entries
    past the last block in use are garbage and never followed.
    """

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slots: Tensor  # int64 [num_tokens]: block * block_size + place in the block; -1: key and value are not kept
    rows: Tensor  # int64: the tokens that logits are made for
    cu_q: Tensor  # int32 [num_sequences + 1]
    seq_lens: Tensor  # int32 [num_sequences]: how many keys there are, those of this step included
    block_tables: Tensor  # int32 [num_sequences, >= blocks of the longest]
    q_lens: list[int]  # the differences of cu_q, on the host
    kv_lens: list[int]  # seq_lens on the host
    # Of a batch that is used again with other q_lens: their sum is at most this. Tokens past those of the last sequence
    # then belong to none. 0: q_lens stay what they are.
    room: int = 0
    loras: "LoraRows | None" = None  # which tokens run with low-rank adapters; None: none
    pictures: PictureRows | None = None  # None: no sequence of the step has any
    encoded: EncodedRows | None = None  # None: the model has no encoder
    # As they came from the host: ids, positions and slots together, rows, cu_q, seq_lens, tables. Empty: not kept.
    on_host: Sequence[Tensor] = ()
    # Values that ops work out once per step and use in every layer. No other code reads them.
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def make_batch(
    token_ids: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
    q_lens: list[int],
    kv_lens: list[int],
    block_tables: Sequence[Sequence[int]],
    device: torch.device,
    rows: Sequence[int] = (),
) -> TokenBatch:
    """A TokenBatch on `device`. The block tables may be of different lengths. Arrays are quicker than lists."""
    tables = np.zeros((len(block_tables), max(map(len, block_tables), default=0)), dtype=np.int32)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = table
    arrays: list[NDArray[Any]] = [
        np.array([token_ids, positions, slots], dtype=np.int64),
        np.array(rows, dtype=np.int64),
        np.array([0, *accumulate(q_lens)], dtype=np.int32),
        np.array(kv_lens, dtype=np.int32),
        tables,
    ]
    on_host = [torch.from_numpy(array) for array in arrays]
    flat, wanted, cu_q, seq_lens, table_rows = on_host if device.type == "cpu" else packed(on_host, device)
    return TokenBatch(
        token_ids=flat[0],
        positions=flat[1],
        slots=flat[2],
        rows=wanted,
        cu_q=cu_q,
        seq_lens=seq_lens,
        block_tables=table_rows,
        q_lens=q_lens,
        kv_lens=kv_lens,
        on_host=on_host,
    )
