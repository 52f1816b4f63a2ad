"""A folder of packed weights: a model is packed once, and the workers of a machine map the same file (packed_file).

A file is named by all that its bytes depend on. It is written beside its place and moved there when it is on the disk,
so that it is whole or absent. One process at a time packs; others that start meanwhile wait and find the file. The
folder has a bound: files that were not used for longest are removed, which takes nothing from workers that have them
mapped. What would not fit by itself is not written, and nothing is removed for it. Whatever goes wrong here, the
weights are packed in memory as if there were no folder.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from gpu_worker.models.fingerprint import sample_file
from gpu_worker.models.packed.packed_file import NotUsable, PackedFileWriter, Place, open_packed
from gpu_worker.models.packed.packed_weights import PackedWeights

log = logging.getLogger(__name__)
LEAST_BYTES = 16 << 20  # of weights; fewer are packed as fast as a file is opened
KEPT_FREE = 1 << 30  # bytes of the disk that are left to others
LONGEST_WAIT_S = 900.0

HEADER_BYTES = 4096, 256  # of a file, and of each of its tensors: more than there are


class Packing(Protocol):
    """How a checkpoint becomes packed weights. `scheme` is one of packed_weights.SCHEMES."""

    @property
    def scheme(self) -> str: ...

    @property
    def extension(self) -> ModuleType: ...

    def in_memory(self) -> PackedWeights: ...

    def sizes(self) -> list[int]:
        """How many bytes each tensor will have, without reading their numbers."""
        ...

    def into(self, file: PackedFileWriter) -> Mapping[str, Place]:
        """Writes the tensors to a file, each as soon as it is packed. Where each lies, by our names."""
        ...


class PackedCache:
    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def is_worth(self, files: Sequence[Path]) -> bool:
        """Whether files of weights are large enough to be kept packed."""
        return sum(file.stat().st_size for file in files) >= LEAST_BYTES

    def get(self, name: str, key: Mapping[str, Any], packing: Packing) -> PackedWeights | None:
        """The weights of this key, from their file, which is made if there is none. None if no file can be kept."""
        path = self.path(name, key)
        found = self._open(path, key, packing)
        if found is not None:
            return found
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._turn() as mine:
                found = self._open(path, key, packing)
                if found is None and mine:
                    self._write(path, key, packing)
                    found = self._open(path, key, packing)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", self._directory, error)
        return found

    def path(self, name: str, key: Mapping[str, Any]) -> Path:
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
        return self._directory / f"{name.replace('/', '--')[:80]}-{digest}.packed"

    def _open(self, path: Path, key: Mapping[str, Any], packing: Packing) -> PackedWeights | None:
        try:
            packed, how = open_packed(path, key, packing.scheme, packing.extension)
        except FileNotFoundError:
            return None
        except (NotUsable, OSError) as error:
            log.warning("packed weights %s are not used: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used now
        log.info("packed weights: %s", how)
        return packed

    def _write(self, path: Path, key: Mapping[str, Any], packing: Packing) -> None:
        """OSError if there is no room."""
        began = time.monotonic()
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # of a process that was killed
        sizes = [size + HEADER_BYTES[1] for size in packing.sizes()]
        self._make_room(sum(sizes) + HEADER_BYTES[0], part)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(part, flags, 0o600)
        try:
            writer = PackedFileWriter(descriptor, packing.extension, lambda size: self._make_room(size, part))
            writer.finish(key, packing.into(writer))
            os.replace(part, path)
            _sync_folder(self._directory)
        finally:
            os.close(descriptor)
            part.unlink(missing_ok=True)
        log.info("packed weights: packed and written to %s in %.1f s", path, time.monotonic() - began)

    def _make_room(self, size: int, part: Path) -> None:
        """Removes what was not used for longest until a file of this size fits. OSError, and nothing is removed, if it
        cannot fit."""
        if size > self._most_bytes:
            reason = (
                f"they take {size} bytes, more than packed_cache_bytes ({self._most_bytes}): every start packs them"
            )
            raise OSError(errno.EFBIG, f"{reason}, unless --packed-cache-bytes is larger")
        others, written = [], 0
        for each in self._directory.iterdir():
            if each.suffix in (".packed", ".part"):
                with suppress(FileNotFoundError):
                    stat = each.lstat()
                    if each == part:
                        written = stat.st_size
                    else:
                        others.append((stat.st_mtime_ns, stat.st_size, each))
        excess, removed = size + sum(bytes_ for _, bytes_, _ in others) - self._most_bytes, list[Path]()
        disk = os.statvfs(self._directory)
        free = disk.f_bavail * disk.f_frsize - (size - written)
        for _, bytes_, oldest in sorted(others):
            if excess > 0:
                removed.append(oldest)
                excess, free = excess - bytes_, free + bytes_
        if free < KEPT_FREE:
            reason = f"its disk would have less than {KEPT_FREE >> 20} MiB left beside their {size} bytes"
            raise OSError(errno.ENOSPC, reason)
        for oldest in removed:
            oldest.unlink(missing_ok=True)
            log.info("packed weights: removed %s, which was not used for longest", oldest)

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits until no other process packs; whether it is this one's turn."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield _locked(descriptor)
        finally:
            os.close(descriptor)  # and with it the lock


def _locked(descriptor: int) -> bool:
    until, told = time.monotonic() + LONGEST_WAIT_S, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                log.warning("packed weights: another process packs for longer than %.0f s", LONGEST_WAIT_S)
                return False
        if not told:
            log.info("packed weights: another process packs; waiting for it")
            told = True
        time.sleep(0.05)


def content_key(files: Sequence[Path], small_files: Sequence[Path]) -> dict[str, Any]:
    """What tells the content of a checkpoint: samples, sizes and times of its weights, and small files as they are."""
    weights = []
    for path in files:
        stat = path.stat()
        weights.append([path.name, stat.st_size, stat.st_mtime_ns, sample_file(path).hex()])
    small = [[path.name, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()] for path in small_files]
    return {"weights": weights, "small": small}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
