"""A rank's part of a decoder on a device of its own, and how it meets the others.

Rank 0 writes an order into memory of all ranks, all meet, and each queues its part on its device. When all have done
so they meet again: the memory is free, and none has stopped. Columns go from device to device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder_part import DecoderPart
from gpu_worker.models.decoders.ranks.column_exchange import ColumnExchange
from gpu_worker.models.decoders.ranks.order_room import OrderRoom
from gpu_worker.models.decoders.ranks.place import RankPlace, ShareSpan, TeamBroken
from gpu_worker.ops import TokenBatch

FORWARD, LOGITS, SWAP_OUT, SWAP_IN, COPY, SPOIL, END = range(7)  # what rank 0 wants
MOST_PAIRS = 1 << 14  # blocks that an order names
SWAPPED, STAGED = 0, 1  # kinds of copies: in the order of steps, and beside them
PROGRESS = 8  # numbers, which fill a line of the cache


class DeviceTeam(DecoderPart):
    """Orders of rank 0 are carried out in all ranks in the same order, each by the thread that runs steps."""

    def __init__(
        self, place: RankPlace, device: torch.device, columns: Mapping[str, Sequence[ShareSpan]], context_tokens: int
    ) -> None:
        """`columns` are those of each rank, by name; those of `kv_heads` are the heads."""
        kv_heads = columns["kv_heads"][place.rank]
        super().__init__(kv_heads.num)
        self.first_kv_head = kv_heads.first
        self.place = place
        self._columns = columns
        self._widths = {name: [span.num for span in spans] for name, spans in columns.items()}
        self._device = device
        self._is_front = place.rank == 0
        shared = {"wanted": (1, PROGRESS), "pairs": (MOST_PAIRS, 2), "progress": (place.size, PROGRESS)}
        self._room = OrderRoom(place, context_tokens, {name: (*form, torch.int64) for name, form in shared.items()})
        wanted, self._pairs, self._progress = (self._room.columns[name].numpy() for name in shared)
        self._wanted = wanted[0]  # an order, and two numbers
        self._team = self._room.team
        self._exchange: ColumnExchange | None = None
        self._forwarded: Tensor | None = None
        self._num_moves = 0

    def connect(self) -> None:
        """Waits until all ranks have loaded their model, or the front gives up (rank_watch.py), and connects devices.

        Called once, before all else. Raises TeamBroken if a rank has ended.
        """
        warm = torch.ones((16, 16), device=self._device)
        (warm @ warm).sum().item()  # libraries are loaded now, and not while others wait for a lease
        self.place.on_team(self)
        self._room.expect(self._team.meet_for_orders())
        try:
            self._exchange = ColumnExchange(self.place, self._device)
            self.numbers_of_all([0])  # sets connections up
        except RuntimeError as error:
            raise self._failed(error) from error

    @property
    def trouble(self) -> str:
        """Why the team is broken; empty if it is not."""
        return str(self._team.trouble)

    def waited_s(self, rank: int) -> float:
        """How long a rank has waited for others, but for what devices wait for."""
        return float(self._team.waited_s(rank))

    def break_off(self) -> None:
        """Ends all meetings, and what devices wait for, from any thread."""
        self._team.break_off()
        if self._exchange is not None:
            self._exchange.abort()

    def close(self) -> None:
        """After `break_off`, when nothing is computed any more."""
        if self._exchange is not None:
            self._exchange.close()

    def numbers_of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank has said, by rank. All call it."""
        try:
            return self._exchanging.numbers_of_all(numbers)
        except RuntimeError as error:
            raise self._failed(error) from error

    def forward(self, decoder: Any, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Any:
        if rows is not batch.rows:
            raise ValueError("ranks compute the rows of the batch")
        if not self._is_front:
            self._forwarded = decoder.compute(batch, kv, rows)
            return self._forwarded
        self._room.order_forward(batch, rows)
        with self._all_in_order(FORWARD):
            self._forwarded = decoder.compute(batch, kv, rows)
        return self._forwarded

    def logits(self, decoder: Any, hidden: Tensor) -> Tensor:
        """Of rows of what was forwarded last, which each rank has."""
        forwarded = self._forwarded
        if forwarded is None or hidden.untyped_storage().data_ptr() != forwarded.untyped_storage().data_ptr():
            raise ValueError("ranks know the states alone that the last step has made")
        first = hidden.storage_offset() // forwarded.shape[1]
        with self._all_in_order(LOGITS, len(hidden), first):
            return self.join("logits", decoder.own_logits(hidden))

    def order_move(self, order: int, pairs: Sequence[tuple[int, int]]) -> int:
        """In rank 0: makes the others do with their heads of blocks what this rank is about to do with its own.

        Returns the order's number, by which `have_copied` is asked.
        """
        for start in range(0, len(pairs), MOST_PAIRS):
            self._num_moves += 1
            named = pairs[start : start + MOST_PAIRS]
            self._pairs[: len(named)] = named
            with self._all_in_order(order, len(named), self._num_moves):
                pass
        return self._num_moves

    def have_copied(self, kind: int, number: int) -> bool:
        """In rank 0: whether all others have made the copies of an order."""
        return bool((self._progress[1:, kind] >= number).all())

    def note_copied(self, kind: int, number: int) -> None:
        """In a rank other than 0: it has made the copies of all orders up to this one."""
        self._progress[self.place.rank, kind] = number

    def order_end(self) -> None:
        """In rank 0: the others return from `serve`."""
        with self._all_in_order(END):
            pass

    @torch.inference_mode()
    def serve(
        self,
        decoder: Any,
        kv: Sequence[Tensor],
        move: Callable[[int, int, Sequence[tuple[int, int]]], None],
        settle: Callable[[Callable[[], set[int]]], None],
        note: Callable[[], None],
    ) -> bool:
        """In a rank other than 0: carries out orders. True: rank 0 has said END; False: the team is broken.

        `move` is given an order that concerns blocks, its number and the blocks; `settle`, before a step
        is computed, what tells the blocks that it uses. `note` is called when all work of an order is queued.
        """
        try:
            while self._team.meet_for_orders():
                order, count, number = self._wanted[:3].tolist()
                if order == FORWARD:
                    settle(self._room.used_blocks)
                    batch = self._room.batch(self._device)
                    decoder.forward(batch, kv, batch.rows)
                elif order == LOGITS:
                    self.join("logits", decoder.own_logits(self._states()[number : number + count]))
                elif order != END:
                    move(order, number, [(source, target) for source, target in self._pairs[:count].tolist()])
                note()
                self._room.expect(self._team.meet_all())
                if order == END:
                    return True
        except TeamBroken:
            pass
        return False

    def join(self, name: str, own: Tensor) -> Tensor:
        try:
            return self._exchanging.join(own, self._widths[name])
        except torch.OutOfMemoryError:  # of this rank's device, and no loss of another one
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def own(self, name: str, joined: Tensor) -> Tensor:
        first, num = self._columns[name][self.place.rank]
        return joined[:, first : first + num]

    @contextmanager
    def _all_in_order(self, order: int, count: int = 0, number: int = 0) -> Iterator[None]:
        """In rank 0: all carry out an order. If this rank fails in the middle of it, the team is broken: others wait
        for its columns, and would take the next order for the rest of this one."""
        self._wanted[:3] = order, count, number
        try:
            self._room.expect(self._team.meet_all())
            yield
            self._room.expect(self._team.meet_all())
        except BaseException:
            self.break_off()
            raise

    def _states(self) -> Tensor:
        if self._forwarded is None:
            raise RuntimeError("logits are asked for before the first step")
        return self._forwarded

    @property
    def _exchanging(self) -> ColumnExchange:
        if self._exchange is None:
            raise RuntimeError("the team has not met yet")
        return self._exchange

    def _failed(self, error: RuntimeError) -> TeamBroken:
        """Of an exchange: who is missing is known when it does not come to a meeting, either."""
        if isinstance(error, TeamBroken):
            return error
        self._team.meet_all()
        self._team.break_off()
        return TeamBroken(f"{self.trouble} ({error})")
