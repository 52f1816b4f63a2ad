"""A runner without a model: the next token is a hash of the tokens before it.

Its output depends on prompt, seed and branch alone, so a test can compute it by `fake_oracle`. It does not read the
blocks of a sequence; WitnessRunner does.
"""

import math
import os
import signal
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TypedDict, Unpack

from gpu_worker.steps.mask import Mask
from gpu_worker.steps.pooling import PooledChunk, added
from gpu_worker.steps.runner import NOTHING_LEFT, BlocksInPlace, PictureMemory, RunnerInfo, StepOutput, ignore
from gpu_worker.steps.seats import Seat, Seats
from gpu_worker.steps.step_input import KnownTokens, StepInput
from gpu_worker.testing.pretended_adapters import PretendedAdapters
from gpu_worker.testing.pretended_pictures import PretendedPictures
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.pooling.params import ModelPooling, PoolKind
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.text.tokenizers import byte_tokenizer

GREEDY = SamplingParams(temperature=0.0)
MASK = 2**64 - 1
HIDDEN_SIZE = 16
SET_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


class RunnerSizes(TypedDict, total=False):
    """The fields of RunnerInfo that a test may choose for a runner without a model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    kv_cache_bytes: int  # in place of num_blocks, unless it is 0
    num_host_blocks: int
    context_tokens: int
    window: int
    model: str
    numerics: str
    pictures: PictureSupport


def new_runner_info(
    kind: str, kv_dtype: str, bytes_per_slot: int, generate_eos: bool, **sizes: Unpack[RunnerSizes]
) -> RunnerInfo:
    """The RunnerInfo of a runner without a model; `kind` names the runner."""
    block_size, vocab_size = sizes.get("block_size", 16), sizes.get("vocab_size", 1000)
    bytes_per_block = block_size * bytes_per_slot
    num_blocks = sizes.get("kv_cache_bytes", 0) // bytes_per_block or sizes.get("num_blocks", 1024)
    return RunnerInfo(
        model=sizes.get("model", kind),
        fingerprint=f"{kind}-{vocab_size}-{generate_eos}",
        layout=f"{kind}-{block_size}",
        piece_invariant=True,
        numerics=sizes.get("numerics", ""),
        kv_dtype=kv_dtype,
        device="cpu",
        vocab_size=vocab_size,
        context_tokens=sizes.get("context_tokens", 8192),
        eos_token_ids=sizes.get("eos_token_ids", (0,)),
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=sizes.get("num_host_blocks", 256),
        bytes_per_block=bytes_per_block,
        window=sizes.get("window", 0),
        tokenizer=byte_tokenizer.NAME,
        pooling=ModelPooling(HIDDEN_SIZE),
        pictures=sizes.get("pictures", NO_PICTURES),
    )


class RunnerWithoutModel:
    """What FakeRunner and WitnessRunner have in common. `step_s` is how long a step takes at least."""

    def __init__(
        self,
        info: RunnerInfo,
        generate_eos: bool,
        step_s: float,
        adapters: PretendedAdapters | None = None,
        pictures: PretendedPictures | None = None,
    ) -> None:
        self.info = info
        self.step_s = step_s
        self.adapters = adapters
        self.pictures: PictureMemory | None = pictures
        self.seats = Seats(with_adapters=adapters is not None, with_pictures=pictures is not None)
        self._choose = Chooser(info, generate_eos=generate_eos)

    def _begin(self, step: StepInput) -> list[Seat]:
        """Takes the time of the step. Returns the branches of its chunks."""
        if self.step_s and step.seats:
            time.sleep(self.step_s)
        self.seats.update(step)
        if self.adapters is not None:
            for opened in step.opened:
                seat = self.seats.find(opened.seat)
                seat.root = self.adapters.root_with(opened.root, opened.adapter)
        return self.seats.of_chunks(step)

    def _score(self, known: KnownTokens, seat: Seat, state: Callable[[int], int]) -> list[TokenScore]:
        """The scores of known tokens. `state` says the state of the context of so many tokens."""
        tokens = enumerate(known.tokens, known.first)
        return [self._choose.score(state(position), token, seat.params) for position, token in tokens]

    def _pool(self, pooled: PooledChunk, span: range, state: Callable[[int], int]) -> "array[float]":
        """What is wanted of the states of a chunk, whose tokens have the positions `span`."""
        if pooled.kind is PoolKind.MEAN:
            return added(pooled.total, (state_vector(state(position + 1)) for position in span))
        last = state(span.stop)
        if pooled.kind is PoolKind.LAST:
            return array("f", state_vector(last))
        return array("f", (mix(last, token) % 4096 / 256 for token in pooled.token_ids))

    def check_device(self) -> None:
        """Does nothing: there is no device that could break."""

    def close(self) -> None:
        """Does nothing: Python frees the memory."""


class FakeRunner(RunnerWithoutModel):
    """A Runner whose steps take `step_s` each.

    A step that has to compute the token `die_on_token` kills the process, as a request that crashes a model would.
    """

    def __init__(
        self, *, generate_eos: bool = False, step_s: float = 0.0, die_on_token: int = -1, **sizes: Unpack[RunnerSizes]
    ) -> None:
        super().__init__(new_runner_info("fake", "none", 1024, generate_eos, **sizes), generate_eos, step_s)
        self._die_on_token = die_on_token

    @cached_property
    def block_memory(self) -> BlocksInPlace:
        """Zeros, which no step reads: blocks of this runner travel, but nothing depends on them."""
        memory = memoryview(bytearray(self.info.num_blocks * self.info.bytes_per_block))
        return BlocksInPlace(memory, self.info.num_blocks)

    def run(self, step: StepInput, on_copied: Callable[[], None] = ignore) -> StepOutput:
        on_copied()  # it copies nothing
        output, seats = StepOutput([]), self._begin(step)
        if self._die_on_token in step.tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        for known in step.scored:
            seat = seats[known.chunk]
            states = {
                length: fold(seat.tokens[:length]) for length in range(known.first, known.first + len(known.tokens))
            }
            output.scored[known.chunk] = self._score(known, seat, states.__getitem__)
        for pooled in step.pooled:
            tokens, end = seats[pooled.chunk].tokens, step.ends[pooled.chunk]
            span = range(end - step.lengths[pooled.chunk], end)
            states = {length: fold(tokens[:length]) for length in range(span.start + 1, end + 1)}
            output.pooled[pooled.chunk] = self._pool(pooled, span, states.__getitem__)
        for sample in self.seats.samples(step):
            self._choose.sample(fold(sample.tokens), sample, output)
        return output


class Chooser:
    """Turns the 64-bit state of a context into tokens and log probabilities: equal states give equal ones.

    A greedy branch gets the likeliest token. Any other branch gets one that depends on seed, branch and index too.
    """

    def __init__(self, info: RunnerInfo, *, generate_eos: bool = False) -> None:
        eos = () if generate_eos else info.eos_token_ids
        self._vocab_size = info.vocab_size
        self._ids = [token for token in range(info.vocab_size) if token not in eos]
        if not self._ids:
            raise ValueError("vocab_size: every token would be an end of sequence")

    def token(self, state: int, params: SamplingParams, branch: int, index: int, mask: Mask | None = None) -> int:
        if not params.greedy and not params.beam_width:
            state = mix(state, (params.seed or 0) + 1, branch + 1, index + 1)
        if mask is None:
            return self._ids[state % len(self._ids)]
        left = allowed_by(bytes(mask), self._vocab_size)
        return left[state % len(left)] if left else NOTHING_LEFT

    def top(self, state: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens with their log probabilities, the best first; every context has its own scale."""
        size = len(self._ids)
        scale = 0.25 + (state >> 32) % 997 / 997
        return tuple(
            (self._ids[(state + rank) % size], -scale * math.log2(rank + 2)) for rank in range(min(count, size))
        )

    def score(self, state: int, token: int, params: SamplingParams) -> TokenScore:
        scale = 0.25 + (state >> 32) % 997 / 997
        rank = (self._ids.index(token) - state) % len(self._ids) if token in self._ids else len(self._ids)
        return TokenScore(token, -scale * math.log2(rank + 2), self.top(state, self._width(params)))

    def sample(self, state: int, sample: Seat, output: StepOutput) -> None:
        params = sample.params
        token = self.token(state, params, sample.index, sample.num_output, sample.mask)
        if token >= 0 and (params.logprobs is not None or params.ranked):
            output.scores[len(output.token_ids)] = self.score(state, token, params)
        output.token_ids.append(token)

    def _width(self, params: SamplingParams) -> int:
        return 2 * params.beam_width or params.logprobs or 0


def allowed_by(mask: bytes, vocab_size: int) -> list[int]:
    """The tokens whose bits are set, in order."""
    found = [8 * place + bit for place, byte in enumerate(mask) if byte for bit in SET_BITS[byte]]
    while found and found[-1] >= vocab_size:
        found.pop()
    return found


def state_vector(state: int) -> list[float]:
    """The hidden state that a runner without a model has for the state of a context: numbers from -1 to 1."""
    digest = blake2b(struct.pack("<Q", state), digest_size=HIDDEN_SIZE).digest()
    return [byte / 128 - 1 for byte in digest]


def mix(*words: int) -> int:
    """A 64-bit hash of a few numbers of at most 64 bits."""
    return int.from_bytes(
        blake2b(struct.pack(f"<{len(words)}Q", *(word & MASK for word in words)), digest_size=8).digest(), "little"
    )


def fold(token_ids: Sequence[int]) -> int:
    return int.from_bytes(blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=8).digest(), "little")


def fake_oracle(
    prompt: Sequence[int],
    num_tokens: int,
    *,
    info: RunnerInfo,
    params: SamplingParams = GREEDY,
    branch: int = 0,
    generate_eos: bool = False,
) -> list[int]:
    """The tokens that a FakeRunner generates after a prompt, computed without a runner."""
    chooser = Chooser(info, generate_eos=generate_eos)
    tokens = list(prompt)
    for index in range(num_tokens):
        tokens.append(chooser.token(fold(tokens), params, branch, index))
    return tokens[len(prompt) :]
