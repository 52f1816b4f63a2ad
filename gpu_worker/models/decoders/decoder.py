"""What the model runner asks of a model, and activations whose bits depend on each number alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.lora import Lora
from gpu_worker.ops.state_format import NO_STATE, StateShape
from octavo.model_files.lora_files import LoraFiles
from octavo.model_files.lora_support import NO_LORA, LoraSupport
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.text.encoded_prompt import NO_ENCODER, EncoderSupport

LoadLora = Callable[[LoraFiles], Lora]  # raises BadModel
EncodeTokens = Callable[[Sequence[int]], Tensor]  # a row for each token


class EncodePicture(Protocol):
    """What stands for the placeholders of a picture, on the CPU. Any thread may call it, beside steps."""

    @property
    def width(self) -> int:
        """How many numbers there are for each placeholder."""
        ...

    @property
    def number_bytes(self) -> int:
        """The bytes of each number of a state."""
        ...

    def __call__(self, pixels: bytes, height: int, width: int) -> Tensor:
        """[placeholders, width]. Raises InvalidArgument if the bytes are no picture, or sound, of that size."""
        ...


class Decoder(Protocol):
    """A model on its device. All layers with attention have keys and values of one shape."""

    name: str  # the name of the implementation, for the log
    vocab_size: int
    context_tokens: int  # positions the model was made for
    num_layers: int  # with keys and values
    num_kv_heads: int
    head_dim: int
    hidden_size: int  # numbers of a hidden state; 0: `states` cannot be asked
    window: int  # how many tokens a query sees at most, in whatever layer; 0: in some layer it sees all
    state: StateShape  # what is remembered beside keys and values; each block has it as it is after its last token
    # Whether forward and logits do the same operations for all batches of the same sizes, without looking at numbers on
    # the device, so that a step can be captured as a CUDA graph.
    capturable: bool
    batch_invariant: bool  # whether a sequence's results do not depend on the batch, provided that the ops' do not

    load_lora: LoadLora | None = None  # makes an adapter that batches may name; None: no adapter runs with this decoder
    lora_support: LoraSupport = NO_LORA  # which adapters these are, or why there are none

    encode_picture: EncodePicture | None = None  # any thread may call it; None: batches have no pictures
    picture_support: PictureSupport = NO_PICTURES  # which pictures these are, or why there are none

    encode: EncodeTokens | None = None  # what an encoder gives, which batches then have; None: there is no encoder
    encoder_support: EncoderSupport = NO_ENCODER  # how prompts are made for it

    def forward(self, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Runs all tokens of the batch and writes their keys and values into `kv`: a tensor for each layer, and
        behind those the layers of the arena that the state fills.

        The result has one row for each of `rows` (int64, tokens of the batch) and is what `logits` takes.
        """
        ...

    def states(self, forwarded: Tensor, first: int) -> Tensor:
        """The hidden states after the last norm: rows from `first` on of what the last call of forward returned."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [num_rows, vocab_size] of the next token. They are valid until the next call."""
        ...


class OwnDecoder(Decoder):
    """A decoder of octavo's own, which keeps keys and values in each layer."""

    def __init__(self, config: Any) -> None:
        """`config` has its sizes."""
        self.vocab_size = config.vocab_size
        self.context_tokens = config.context_tokens
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.hidden_size = config.hidden_size
        self.window = common_window(config.windows)
        self.state = NO_STATE


KEPT_LOGITS = 64 << 20  # bytes


class KeptLogits:
    """Memory for the logits of one call after another.

    The allocator would give tens of megabytes back to the system after each step, and the system takes longer to find
    new pages than a sampler takes to read them.
    """

    def __init__(self, vocab_size: int, shared: Tensor | None = None) -> None:
        """`shared`: memory of a group for some rows, in which it makes them."""
        self._memory = torch.empty((0, vocab_size))
        self._shared = self._memory if shared is None else shared

    def rows(self, count: int) -> Tensor:
        """The first `count` rows, in the memory that earlier calls returned; more than KEPT_LOGITS are not kept."""
        if count <= len(self._shared):
            return self._shared[:count]
        vocab_size = self._memory.shape[1]
        if count * vocab_size * 4 > KEPT_LOGITS:
            return torch.empty((count, vocab_size))
        if count > len(self._memory):
            self._memory = torch.empty((0, vocab_size))  # not both at once
            self._memory = torch.empty((count, vocab_size))
        return self._memory[:count]


def common_window(windows: Iterable[int]) -> int:
    """The longest of the windows of all layers; 0 if some layer has none (0)."""
    windows = list(windows)
    return max(windows) if windows and all(windows) else 0


ElementFunction = Callable[[Tensor], Tensor]
REGISTERS = 64  # numbers that torch takes at once on a CPU, at most: two registers of bfloat16


def by_registers(function: ElementFunction) -> ElementFunction:
    """`function`, which torch computes otherwise, with other bits, for the numbers at the end of a tensor that do not
    fill its registers. Which these are depends on the number of rows, unless rows fill registers."""

    def compute(x: Tensor) -> Tensor:
        missing = -x.shape[-1] % REGISTERS
        if not missing or x.device.type != "cpu":
            return function(x)
        return function(functional.pad(x, (0, missing)))[..., :-missing]

    return compute


gelu = by_registers(functional.gelu)
gelu_tanh = by_registers(lambda x: functional.gelu(x, approximate="tanh"))
silu = by_registers(functional.silu)
sigmoid = by_registers(torch.sigmoid)
