"""What a runner is given for a step (`StepInput`): arrays, and a fixed layout of bytes for them.

A branch that has blocks on the device has a *seat*: a small number under which a runner keeps its tokens, block table
and sampling parameters (`Seats`). An input opens seats with all of that, and later steps bring only what is new, so the
size of an input depends on how many branches run and not on how long they are.

The bytes: a header (magic, version, length, checksum), then arrays in a fixed order, each as how many entries it
has and the entries, filled up to a multiple of eight bytes. The byte order is that of the machine.
"""

import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from types import MappingProxyType
from typing import Any, get_type_hints
from zlib import crc32

from gpu_worker.steps.mask import Mask
from gpu_worker.steps.pooling import PooledChunk
from octavo.pooling.params import PoolKind
from octavo.request.ids import BlockId, HostBlockId
from octavo.request.sampling import SamplingParams

_TYPES = get_type_hints(SamplingParams)
_NUMBERS = {float: "d", int: "q", bool: "q", int | None: "qq", float | None: "qd"}  # q: is it there?
_CODES = {f.name: _NUMBERS[_TYPES[f.name]] for f in fields(SamplingParams) if _TYPES[f.name] in _NUMBERS}
_SCALARS = struct.Struct("=" + "".join(_CODES.values()))
_MAPPINGS, _LISTS, _NESTED = (
    [name for name, kind in _TYPES.items() if kind == wanted]
    for wanted in (Mapping[int, float], tuple[int, ...], tuple[tuple[int, ...], ...])
)
_COUNT = struct.Struct("=q")


def params_to_bytes(params: SamplingParams) -> bytes:
    """The parameters without their texts."""
    numbers: list[float] = []
    for name, code in _CODES.items():
        value = getattr(params, name)
        if len(code) == 2:
            numbers.append(value is not None)
            value = value or 0
        signed = code[-1] == "q" and value >= 2**63  # a seed has 64 bits and no sign
        numbers.append(value - 2**64 if signed else value)
    parts = [_SCALARS.pack(*numbers)]
    for name in _MAPPINGS:
        pairs = getattr(params, name)
        parts.append(struct.pack(f"=q{'qd' * len(pairs)}", len(pairs), *chain.from_iterable(pairs.items())))
    for name in _LISTS:
        parts.append(_list(getattr(params, name)))
    for name in _NESTED:
        lists = getattr(params, name)
        parts += [_COUNT.pack(len(lists)), *map(_list, lists)]
    return b"".join(parts)


def params_from_bytes(data: bytes) -> SamplingParams:
    """The parameters that `params_to_bytes` was given, without their texts."""
    place = 0

    def take_numbers(form: str) -> tuple[Any, ...]:
        nonlocal place
        numbers = struct.unpack_from(f"={form}", data, place)
        place += struct.calcsize(f"={form}")
        return numbers

    def take_list() -> tuple[int, ...]:
        return take_numbers(f"{take_numbers('q')[0]}q")

    numbers = iter(take_numbers("".join(_CODES.values())))
    values: dict[str, Any] = {}
    for name, code in _CODES.items():
        there = next(numbers) if len(code) == 2 else True
        value = next(numbers)
        values[name] = bool(value) if _TYPES[name] is bool else value if there else None
    if values["seed"] is not None:
        values["seed"] %= 2**64
    for name in _MAPPINGS:
        pairs = iter(take_numbers("qd" * take_numbers("q")[0]))
        values[name] = MappingProxyType(dict(zip(pairs, pairs, strict=True)))
    for name in _LISTS:
        values[name] = take_list()
    for name in _NESTED:
        values[name] = tuple(take_list() for _ in range(take_numbers("q")[0]))
    return SamplingParams(**values)


def _list(numbers: tuple[int, ...]) -> bytes:
    return struct.pack(f"={len(numbers) + 1}q", len(numbers), *numbers)


MAGIC, VERSION = 0x54505453, 5  # "STPT" where the least byte comes first
_HEADER = struct.Struct("=IIQQ")  # magic, version, number of bytes, checksum of those after the header
_COUNT = struct.Struct("=Q")
_PAIRS = ("swap_out", "swap_in", "copies", "demotions")
_INTS = ("left", "seats", "lengths", "ends", "sample_tokens", "sample_seats", "sample_branches")
_LONGS = ("tokens", "positions", "slots")


def longs(values: Iterable[int] = ()) -> "array[int]":
    return array("q", values)


def ints(values: Iterable[int] = ()) -> "array[int]":
    return array("i", values)


class InvalidStepInput(ValueError):
    """The bytes are not those of a step input of this version, or not all of them, or they are damaged."""


@dataclass(slots=True)
class OpenedSeat:
    """All that a runner has to know of a branch from here on. It forgets what the seat was before."""

    seat: int
    params: SamplingParams
    num_prompt: int  # how many of its tokens are not output
    tokens: "array[int]"  # int64: those before the step's chunk
    root: bytes = b""  # key of its block hashes
    adapter: int = 0  # which low-rank adapter it runs with; 0: none
    pictures: str = ""  # that its tokens show, packed; the runner has what stands for each, by its digest
    num_encoded: int = 0  # how many of its leading tokens an encoder reads
    encoded: "array[int]" = field(default_factory=longs)  # int64: all of these, unless their keys and values are there


@dataclass(slots=True)
class TableChange:
    """From place `first` on, the seat's block table is `blocks`."""

    seat: int
    first: int
    blocks: "array[int]"  # int32


@dataclass(slots=True)
class KnownTokens:
    """Known tokens of a chunk's branch to score, from position `first` on.

    The token at position p is predicted by the row of p - 1, which has to be in the chunk.
    """

    chunk: int  # its place in `seats`
    first: int
    tokens: "array[int]"  # int64


@dataclass(slots=True)
class StepInput:
    """What a runner does, in this order: swap out, spoil, swap in, copy, demote, run the chunks (decodes come first).

    A chunk is some tokens of one branch, one after another. The arrays of chunks have an entry per chunk, those of
    tokens an entry per token of all chunks, those of samples an entry per token to be drawn.
    """

    step_id: int
    swap_out: list[tuple[BlockId, HostBlockId]] = field(default_factory=list)
    spoil: list[BlockId] = field(default_factory=list)  # debug: freed blocks to be filled with NaN
    swap_in: list[tuple[HostBlockId, BlockId]] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)  # copy on write: (from, to)
    # Copies of idle blocks to the host pool, ahead of their eviction. No step has to wait for them.
    demotions: list[tuple[BlockId, HostBlockId]] = field(default_factory=list)
    timed: bool = False  # the runner waits for the swaps, and says how long they took
    # What is new of seats, in this order
    left: "array[int]" = field(default_factory=ints)  # seats of branches that have no blocks on the device any more
    opened: list[OpenedSeat] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    # Chunks, int32. The first `num_decodes` have one token and one sample each. The next `num_drafted` are decodes with
    # drafts: each of their tokens is sampled, and all but the first are guesses (`Seat.drafts`).
    num_decodes: int = 0
    num_drafted: int = 0
    seats: "array[int]" = field(default_factory=ints)
    lengths: "array[int]" = field(default_factory=ints)  # how many tokens
    ends: "array[int]" = field(default_factory=ints)  # how many keys there are, those of this step included
    # Tokens, int64
    tokens: "array[int]" = field(default_factory=longs)
    positions: "array[int]" = field(default_factory=longs)
    slots: "array[int]" = field(default_factory=longs)  # block * block_size + place in the block
    # Samples, int32. Several may share a token: branches that fork after the step.
    sample_tokens: "array[int]" = field(default_factory=ints)  # from the logits of which token
    sample_seats: "array[int]" = field(default_factory=ints)  # whose parameters and history count
    sample_branches: "array[int]" = field(default_factory=ints)  # index of the branch, which its draws depend on
    masks: Mapping[int, Mask] = field(default_factory=dict)  # by sample
    scored: list[KnownTokens] = field(default_factory=list)  # for prompt_logprobs, and cumulative_logprob of a replay
    pooled: list[PooledChunk] = field(default_factory=list)  # whose hidden states are wanted, in the order of chunks

    @property
    def empty(self) -> bool:
        return not (self.seats or self.swap_out or self.swap_in or self.copies)

    @property
    def touches_other_blocks(self) -> bool:
        """Whether the runner reads or writes blocks that are in no table of a branch any more, or not yet."""
        return bool(self.swap_out or self.swap_in or self.copies or self.demotions or self.spoil)

    def to_bytes(self) -> bytes:
        """The input in the fixed layout. Texts in sampling parameters are left out: a runner sees tokens only."""
        out = _Writer()
        counts = [len(each) for each in (self.opened, self.tables, self.scored, self.pooled)]
        out.put(longs((self.step_id, self.timed, self.num_decodes, self.num_drafted, *counts)))
        for name in _LONGS:
            out.put(getattr(self, name))
        for name in _INTS:
            out.put(getattr(self, name))
        for name in _PAIRS:
            out.put(ints(chain.from_iterable(getattr(self, name))))
        out.put(ints(self.spoil))
        out.put(ints(self.masks))
        for mask in self.masks.values():
            out.put(array("B", bytes(mask)))
        for opened in self.opened:
            out.put(ints((opened.seat, opened.num_prompt, opened.adapter, opened.num_encoded)))
            out.put(opened.tokens)
            out.put(array("B", opened.root))
            out.put(array("B", params_to_bytes(opened.params)))
            out.put(array("B", opened.pictures.encode()))
            out.put(opened.encoded)
        for change in self.tables:
            out.put(ints((change.seat, change.first)))
            out.put(change.blocks)
        for known in self.scored:
            out.put(ints((known.chunk, known.first)))
            out.put(known.tokens)
        for pooled in self.pooled:
            out.put(ints((pooled.chunk, pooled.kind)))
            out.put(pooled.token_ids)
            out.put(pooled.total)
        body = b"".join(out.parts)
        return _HEADER.pack(MAGIC, VERSION, _HEADER.size + len(body), crc32(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "StepInput":
        """The input that `to_bytes` was asked of. Raises InvalidStepInput for any other bytes."""
        view = memoryview(data).cast("B")
        if len(view) < _HEADER.size:
            raise InvalidStepInput(f"a step input has a header of {_HEADER.size} bytes, here are {len(view)} bytes")
        magic, version, size, checksum = _HEADER.unpack_from(view)
        if (magic, version) != (MAGIC, VERSION):
            raise InvalidStepInput(f"not a step input of version {VERSION}: {bytes(view[: _HEADER.size]).hex()}")
        body = view[_HEADER.size :]
        if size != len(view) or crc32(body) != checksum:
            raise InvalidStepInput(f"a step input of {size} bytes is damaged or incomplete: here are {len(view)} bytes")
        take = _Reader(body).take_array
        step_id, timed, num_decodes, num_drafted, num_opened, num_tables, num_scored, num_pooled = take("q")
        step = cls(step_id, timed=bool(timed), num_decodes=num_decodes, num_drafted=num_drafted)
        for name in _LONGS:
            setattr(step, name, take("q"))
        for name in _INTS:
            setattr(step, name, take("i"))
        for name in _PAIRS:
            numbers = iter(take("i"))
            setattr(step, name, list(zip(numbers, numbers, strict=True)))
        step.spoil = list(map(BlockId, take("i")))
        step.masks = {sample: Mask.of(take("B").tobytes()) for sample in take("i")}
        for _ in range(num_opened):
            seat, num_prompt, adapter, num_encoded = take("i")
            tokens, root, params = take("q"), take("B").tobytes(), params_from_bytes(take("B").tobytes())
            pictures = take("B").tobytes().decode("ascii")
            opened = OpenedSeat(seat, params, num_prompt, tokens, root, adapter, pictures, num_encoded, take("q"))
            step.opened.append(opened)
        for _ in range(num_tables):
            seat, first = take("i")
            step.tables.append(TableChange(seat, first, take("i")))
        for _ in range(num_scored):
            chunk, first = take("i")
            step.scored.append(KnownTokens(chunk, first, take("q")))
        for _ in range(num_pooled):
            chunk, kind = take("i")
            step.pooled.append(PooledChunk(chunk, PoolKind(kind), take("i"), take("d")))
        return step


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def put(self, values: "array[Any]") -> None:
        data = values.tobytes()
        self.parts += (_COUNT.pack(len(values)), data, bytes(-len(data) % 8))


class _Reader:
    def __init__(self, body: memoryview) -> None:
        self._body, self._place = body, 0

    def take_array(self, kind: str) -> "array[Any]":
        (count,) = _COUNT.unpack_from(self._body, self._place)
        values: array[Any] = array(kind)
        begin = self._place + _COUNT.size
        end = begin + count * values.itemsize
        values.frombytes(self._body[begin:end])
        self._place = end + -end % 8
        return values
