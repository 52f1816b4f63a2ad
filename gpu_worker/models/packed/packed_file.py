"""Packed weights as one file, which workers map read-only and so share.

The file is data, then a header, then an end of 48 bytes: a magic that names the format, the header's length, and the
digest of the header. The header is JSON: what was packed (`key`), where each tensor lies, and a checksum of every chunk
of the data. So each byte is under a checksum, and a file that lacks its last bytes has no end. All of it is checked
before a tensor is served, by all threads of the extension: the memory has to be read once anyway.

Data is written by whole chunks, because Linux keeps what is written or read so in huge pages where the file system can
(ext4 since 6.16, xfs).
"""

import hashlib
import json
import mmap
import os
import struct
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.packed.packed_weights import NativeMatrix, PackedWeights, inputs_of
from gpu_worker.models.packed.weight_memory import LINE, HugePageAllocator, has_huge_pages

MAGIC = b"octvpk01"
END = struct.Struct("<8sQ32s")
CHUNK_BYTES = 16 << 20  # a multiple of a huge page
MOST_HEADER_BYTES = 64 << 20
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

Place = dict[str, Any]  # of a tensor: offset, bytes, shape, format, and whether it is a matrix


class NotUsable(Exception):
    """The file is damaged, holds something else, or is not the user's own."""


class PackedFileWriter:
    """Writes tensors one after the other. `before_chunk` is told the file's size before it grows; it may raise."""

    def __init__(self, descriptor: int, extension: ModuleType, before_chunk: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._extension = extension
        self._before_chunk = before_chunk
        self._chunk = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._filled = 0
        self._sums: list[int] = []

    def add_matrix(self, matrix: NativeMatrix) -> Place:
        """Writes a matrix, whose memory may be used again afterwards."""
        weight = matrix.weight
        place = self._add(matrix.data, [weight.rows, weight.cols], weight.format)
        return place | {"matrix": True}

    def add_vector(self, vector: Tensor) -> Place:
        return self._add(vector.float(), list(vector.shape), "f32")

    def finish(self, key: Mapping[str, Any], places: Mapping[str, Place]) -> None:
        """Writes what is left and the header. Then the file is whole, and on the disk."""
        size = self._size()
        self._flush()
        content = {"key": key, "chunk_bytes": CHUNK_BYTES, "data_bytes": size, "sums": self._sums, "tensors": places}
        header = json.dumps(content).encode()
        self._before_chunk(size + len(header) + END.size)
        self._write(memoryview(header + END.pack(MAGIC, len(header), _digest(header))))
        os.fsync(self._descriptor)

    def _add(self, tensor: Tensor, shape: list[int], format_: str) -> Place:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        self._append(torch.zeros(-self._size() % LINE, dtype=torch.uint8))
        place = {"offset": self._size(), "bytes": len(data), "shape": shape, "format": format_}
        self._append(data)
        return place

    def _size(self) -> int:
        return len(self._sums) * CHUNK_BYTES + self._filled

    def _append(self, data: Tensor) -> None:
        while len(data):
            taken = min(len(data), CHUNK_BYTES - self._filled)
            self._chunk[self._filled : self._filled + taken] = data[:taken]
            self._filled += taken
            data = data[taken:]
            if self._filled == CHUNK_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self._before_chunk(self._size())
            data = self._chunk[: self._filled].numpy().data
            number = len(self._sums)
            self._sums.append(_sum(self._extension, data, number))
            self._filled = 0
            self._write(data)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def open_packed(path: Path, key: Mapping[str, Any], scheme: str, extension: ModuleType) -> tuple[PackedWeights, str]:
    """The weights in a file, mapped, and how they came. FileNotFoundError if there is none; NotUsable says what is
    wrong with it."""
    began = time.monotonic()
    memory, header = _map(path, key)
    data = torch.empty(0, dtype=torch.uint8) if memory is None else _bytes_of(memory)[: header["data_bytes"]]
    _check_sums(data, header, extension)
    took = f"checked in {time.monotonic() - began:.2f} s"
    how = f"{len(data) / 1e6:.0f} MB mapped from {path}, {took}"
    if memory is not None and 2 * _huge_bytes(data.data_ptr()) < len(data) and has_huge_pages():
        # Products read small pages at two thirds of the speed: the worker has memory of its own, as without a file.
        own = HugePageAllocator().allocate(len(data))
        for begin in range(0, len(data), CHUNK_BYTES):
            own[begin : begin + CHUNK_BYTES] = data[begin : begin + CHUNK_BYTES]
            memory.madvise(
                mmap.MADV_DONTNEED, begin, min(CHUNK_BYTES, len(data) - begin)
            )  # so that both never take memory at once
        data, how = own, f"{len(data) / 1e6:.0f} MB copied from {path}, which is not in huge pages, {took}"
    try:
        tensors = {name: _tensor(data, place, scheme, extension) for name, place in header["tensors"].items()}
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise NotUsable(f"it has another layout: {error}") from error
    return PackedWeights(tensors, scheme), how


def _map(path: Path, key: Mapping[str, Any]) -> tuple[mmap.mmap | None, dict[str, Any]]:
    descriptor = _open_own(path)
    try:
        size = os.fstat(descriptor).st_size
        header = _read_header(descriptor, size)
        if header.get("key") != key:
            raise NotUsable("it was made of something else")
        if not header["data_bytes"]:
            return None, header
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, header


def _open_own(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotUsable(str(error)) from error
    if problem := _foreign(os.fstat(descriptor)):
        os.close(descriptor)
        raise NotUsable(problem)
    return descriptor


def _foreign(stat: os.stat_result) -> str:
    """Why a file is not to be trusted; empty if nobody but this user can have written it."""
    if stat.st_mode & 0o170000 != 0o100000:
        return "it is no plain file"
    if stat.st_uid != os.geteuid():
        return f"it belongs to user {stat.st_uid}, and this is user {os.geteuid()}"
    return "others than its owner may write it" if stat.st_mode & 0o022 else ""


def _read_header(descriptor: int, size: int) -> dict[str, Any]:
    end = os.pread(descriptor, END.size, max(0, size - END.size))
    if len(end) < END.size:
        raise NotUsable("it is cut off")
    magic, length, digest = END.unpack(end)
    if magic != MAGIC or length > min(MOST_HEADER_BYTES, size - END.size):
        raise NotUsable("it is cut off, or of another version")
    raw = os.pread(descriptor, length, size - END.size - length)
    if _digest(raw) != digest:
        raise NotUsable("its header is damaged")
    header: dict[str, Any] = json.loads(raw)
    if header["data_bytes"] + length + END.size != size or header["chunk_bytes"] != CHUNK_BYTES:
        raise NotUsable("its header does not fit the file")
    return header


def _bytes_of(memory: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch cannot say that a tensor is read-only
        return torch.frombuffer(memory, dtype=torch.uint8)


def _check_sums(data: Tensor, header: Mapping[str, Any], extension: ModuleType) -> None:
    chunks = [data[i : i + CHUNK_BYTES].numpy().data for i in range(0, len(data), CHUNK_BYTES)]
    with ThreadPoolExecutor(extension.threads()) as threads:
        sums = list(threads.map(lambda each: _sum(extension, each[1], each[0]), enumerate(chunks)))
    if sums != header["sums"]:
        raise NotUsable("its data is damaged")


def _sum(extension: ModuleType, chunk: memoryview, number: int) -> int:
    totals = bytearray(64)
    extension.part_sum.add_part(totals, number, 0, [chunk])
    value: int = extension.part_sum.digest(totals, number, len(chunk))
    return value


def _digest(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=32, person=b"octavo.packed").digest()


def _tensor(data: Tensor, place: Place, scheme: str, extension: ModuleType) -> Tensor | NativeMatrix:
    begin, end, format_ = place["offset"], place["offset"] + place["bytes"], place["format"]
    part = data[begin:end]
    if format_ in PLAIN:
        part = part.view(PLAIN[format_]).view(place["shape"])
    if "matrix" not in place:
        return part
    return NativeMatrix(part, extension.Weight(part, format_, *place["shape"], inputs=inputs_of(format_, scheme)))


def _huge_bytes(address: int) -> int:
    """How much of the mapping that begins at an address lies in huge pages."""
    begins = f"{address:08x}-"
    here = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.partition(" ")[0]:
                here = line.startswith(begins)
            elif here and line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) << 10
    return 0
