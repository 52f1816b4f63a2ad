"""What a runner is (`Runner`), what it says of itself (`RunnerInfo`), and what a step of it brings (`StepOutput`)."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from gpu_worker.steps.step_input import StepInput
from octavo.model_files.lora_support import LoraSupport
from octavo.pictures.picture import Picture
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.pooling.params import ModelPooling
from octavo.request.sampling import TokenScore
from octavo.text.encoded_prompt import NO_ENCODER, EncoderSupport

BAD_LOGITS = -1
NOTHING_LEFT = -2
ADAPTER_BYTES = 512 << 20


@dataclass(slots=True, eq=False)
class StepOutput:
    """What the runner returns for a step.

    `token_ids` has an entry per sample of the input. BAD_LOGITS marks one whose logits were not finite, NOTHING_LEFT
    one whose mask allows no token that the other parameters do. `scores` (by sample) has an entry for each sample whose
    parameters ask for logprobs, are ranked, or search beams; for a beam, `top` holds 2 * beam_width candidates.
    `scored` (by chunk) holds the scores of the input's known tokens, `pooled` (by chunk) what is wanted of
    hidden states: float32, or float64 for a sum.
    """

    token_ids: list[int]
    scores: dict[int, TokenScore] = field(default_factory=dict)
    scored: dict[int, list[TokenScore]] = field(default_factory=dict)
    pooled: "dict[int, array[float]]" = field(default_factory=dict)
    copy_s: float = 0.0  # how long the swaps took; 0 if that was not measured
    demote_s: float = 0.0  # how long the step waited for its demotions; 0 if they run beside it
    is_copying: bool = False  # whether some copies were still under way when the step had run


@dataclass(slots=True, frozen=True, kw_only=True)
class RunnerInfo:
    """What the rest of the worker needs to know about a runner's model and memory."""

    model: str  # name that requests use
    fingerprint: str  # of weights, tokenizer, configuration
    layout: str  # fingerprint of a block's layout: dtype, shape, order
    # Whether a token has the same bits whatever runs beside it, and in a piece of any size.
    piece_invariant: bool = False
    keeps_state: bool = False  # whether blocks have a state that goes from token to token: none can be taken back
    numerics: str = ""  # by what its bits may differ from those of another worker of this model; empty: by nothing
    kv_dtype: str
    device: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    # How many tokens a query sees at most, its own included, in whatever layer. 0: in some layer it sees all.
    window: int = 0
    tokenizer: str  # what octavo.text.tokenizers.tokenizer.open_tokenizer takes: a path, or empty if there is none
    # What the model recommends, by field of SamplingParams.
    sampling_defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    pooling: ModelPooling = field(default_factory=ModelPooling)  # what it can be asked of its hidden states
    lora_support: LoraSupport = field(default_factory=LoraSupport)  # which low-rank adapters run with it
    pictures: PictureSupport = NO_PICTURES  # which pictures prompts may show
    encoder: EncoderSupport = NO_ENCODER  # how prompts are made, if the model has an encoder
    adapter_bytes: int = ADAPTER_BYTES  # the memory that these may take where nobody says how much

    @property
    def window_blocks(self) -> int:
        """How many full blocks before its own a token may see, if every layer has a window; at least one. 0: all."""
        return max(1, -(-(self.window - 1) // self.block_size)) if self.window else 0

    @property
    def max_sequence_blocks(self) -> int:
        """How many blocks suffice for one branch of any length, alone, if every layer has a window. 0: no number."""
        return self.window_blocks + 1 if self.window else 0


def ignore() -> None:
    """Does nothing: nobody waits for the copies of a step."""


class BlockMemory(Protocol):
    """The bytes of a runner's blocks, for a connection to another worker. Any thread may call it.

    Who calls makes sure that no step writes a block that is read here, and that none reads a block before it is kept.
    """

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def blocks_per_turn(self) -> int:
        """How many blocks `read_blocks` may be asked for at once."""
        ...

    def read_blocks(self, blocks: SequenceOf[int]) -> AbstractContextManager[Iterator[SequenceOf[memoryview]]]:
        """For each block runs of memory that are, one after another, its bytes. They are valid inside the context."""
        ...

    def open_block(self, block: int) -> SequenceOf[memoryview]:
        """Runs of memory in which the bytes of a block are to be written, one after another."""
        ...

    def keep_block(self, block: int) -> None:
        """Says that all bytes have been written. When it returns, steps that begin later can use the block."""
        ...

    def close_block(self, block: int) -> None:
        """Says that the runs are not written any more. Called once for each `open_block`."""
        ...


class BlocksInPlace:
    """The `BlockMemory` of blocks that are read and written where they lie: [num_layers, num_blocks, bytes]."""

    blocks_per_turn = 1

    def __init__(self, memory: memoryview, num_blocks: int, num_layers: int = 1) -> None:
        self._memory = memory.cast("B")
        self._num_blocks = num_blocks
        self._run_bytes = len(self._memory) // (num_layers * num_blocks)
        self.bytes_per_block = num_layers * self._run_bytes

    def read_blocks(self, blocks: SequenceOf[int]) -> AbstractContextManager[Iterator[list[memoryview]]]:
        return nullcontext(map(self.open_block, blocks))

    def open_block(self, block: int) -> list[memoryview]:
        """The bytes of a block, a run for each layer."""
        if not 0 <= block < self._num_blocks:
            raise IndexError(f"block {block} is not one of the {self._num_blocks} there are")
        starts = range(block * self._run_bytes, len(self._memory), self._num_blocks * self._run_bytes)
        return [self._memory[start : start + self._run_bytes] for start in starts]

    def keep_block(self, block: int) -> None:
        """Does nothing: the bytes are where they belong."""

    def close_block(self, block: int) -> None:
        """Does nothing: the memory stays."""


class ReadAdapter(Protocol):
    """A low-rank adapter in memory, which no step can name yet."""

    @property
    def digest(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


class AdapterMemory(Protocol):
    """A runner's low-rank adapters, each under a number that step inputs name. A number is never given twice."""

    def read(self, source: str, digest: str, max_bytes: int) -> ReadAdapter:
        """Reads the adapter in a folder. Any thread may call it. Raises NotFound, or BadModel for one that cannot run
        here, and for one that has another digest than the one given: other bytes are there now. Raises TooLarge if its
        file has more than `max_bytes`."""
        ...

    def add(self, adapter: ReadAdapter) -> int:
        """The number under which steps run with it from here on: 1 or more. Only between two steps."""
        ...

    def drop(self, number: int) -> None:
        """Forgets an adapter that no step names any more. Only between two steps."""
        ...


class EncodedPicture(Protocol):
    """What stands for the placeholders of a picture, which no step can name yet."""

    @property
    def digest(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


class PictureMemory(Protocol):
    """What a runner has for the placeholders of pictures, by the digests that step inputs name."""

    def num_bytes_of(self, picture: Picture) -> int:
        """The memory that it takes, at most."""
        ...

    def encode(self, picture: Picture, pixels: bytes) -> EncodedPicture:
        """Encodes the pixels of a picture, three bytes each. It takes its time. Any thread may call it, beside steps.

        Raises InvalidArgument unless there are as many as the picture's rows and columns say."""
        ...

    def add(self, encoded: EncodedPicture) -> None:
        """Steps may name it from here on. Only between two steps."""
        ...

    def drop(self, digest: str) -> None:
        """Forgets a picture that no step names any more. Only between two steps."""
        ...


class Runner(Protocol):
    """Runs steps, and sees nothing of sequences but the inputs of its steps.

    It is not thread-safe: the engine's thread is its only caller, but for `block_memory`.
    """

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def block_memory(self) -> BlockMemory:
        """The bytes of the blocks on the device."""
        ...

    @property
    def adapters(self) -> AdapterMemory | None:
        """None: no adapter runs with this model here."""
        ...

    @property
    def pictures(self) -> PictureMemory | None:
        """None: the model takes no pictures."""
        ...

    def run(self, step: StepInput, on_copied: Callable[[], None] = ignore) -> StepOutput:
        """Makes the copies of a step, and runs its chunks.

        Once at most it calls `on_copied`, when the copies are made and nothing copies in the background. From then on
        others may read sealed blocks and write those that nobody uses, until this returns. A runner that cannot tell,
        or that has no such moment, never calls it.
        """
        ...

    def check_device(self) -> None:
        """Raises an error if the device can compute nothing any more. Called after a step that failed."""
        ...

    def close(self) -> None: ...
