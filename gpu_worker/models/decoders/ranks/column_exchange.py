"""How ranks with a device each exchange columns: all-gathers of NCCL between GPUs, of gloo between CPUs.

The process group is this object's own: a program that uses torch.distributed keeps its default group.
"""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.ranks.place import RankPlace

distributed: Any = torch.distributed  # of whose own process groups type checkers know little
LOOPBACK = "127.0.0.1"
# Ranks find each other within seconds, once all are there. NCCL sets up its rings then, and says nothing meanwhile.
MEETING_S = 60.0


class ColumnExchange:
    """Any failure is a RuntimeError. On GPUs no call waits for the device, but for `numbers_of_all`."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        """All ranks make it at the same time."""
        self._size = place.size
        self._device = device
        # The file has no name but this one, which torch's store opens and writes once more when the group is destroyed.
        # Until then no other file may get the number.
        self._meeting = os.dup(place.meeting)
        store = distributed.FileStore(f"/proc/self/fd/{self._meeting}", place.size)
        store.set_timeout(timedelta(seconds=MEETING_S))
        self._ending = threading.Lock()
        self._group = self._nccl(place, store) if device.type == "cuda" else self._gloo(place, store)

    def _gloo(self, place: RankPlace, store: Any) -> Any:
        """On the loopback interface: all ranks are on this host."""
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=place.patience_s)
        return gloo(store, place.rank, place.size, options)

    def _nccl(self, place: RankPlace, store: Any) -> Any:
        """No GPU has run this. The front ends a group that hangs before this timeout does, which ends the process."""
        nccl = distributed.ProcessGroupNCCL  # which a torch for CPUs lacks
        options = nccl.Options()
        options._timeout = timedelta(seconds=MEETING_S + place.patience_s)
        return nccl(store, place.rank, place.size, options)

    def join(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """The columns of all ranks side by side, of which each has as many as `widths` says."""
        rows, most = own.shape[0], max(widths)
        if own.shape[1] == most and own.is_contiguous():
            sent = own
        else:  # all ranks send equally many bytes
            sent = own.new_empty((rows, most))
            sent[:, : own.shape[1]] = own
        parts = self._gathered(sent)
        if rows == 1 and min(widths) == most:
            return parts.view(1, -1)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank has said, by rank."""
        found: list[list[int]] = self._gathered(torch.tensor(numbers, device=self._device)).tolist()
        return found

    def abort(self) -> None:
        """Ends what a device waits for, from any thread."""
        with self._ending:
            if self._group is not None:
                self._group.abort()

    def close(self) -> None:
        """Nothing may be exchanged from here on. The file stays open if this is never called."""
        with self._ending:
            if self._group is not None:
                self._group = None  # nobody else has it, so it is destroyed here
                os.close(self._meeting)

    def _gathered(self, sent: Tensor) -> Tensor:
        """[ranks, …]. Bytes are exchanged, whatever they mean."""
        parts = sent.new_empty((self._size, *sent.shape))
        if sent.numel():
            bytes_of = (parts.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))
            self._group._allgather_base(*bytes_of).wait()
        return parts
