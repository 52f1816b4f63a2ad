"""What a rank of a GPT-like decoder does so that other hosts of its group know what this one does.

The first rank of a host speaks for all of it, between two meetings of its ranks. What is said, and in which order, is
the extension's `GroupHosts`, which Llama-like decoders use, too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.gpt import GptConfig
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.order_room import OrderRoom
from gpu_worker.models.decoders.ranks.place import RankPlace, of_hosts
from gpu_worker.ops import native


class GptHosts:
    """What a rank tells other hosts, and hears from them: here nothing, as all ranks are on one."""

    before = False  # whether another host has the layers before those of this one
    after = False

    def __init__(self, room: OrderRoom) -> None:
        self._room = room

    def tell(self, wanted: Any = None) -> None:
        """In rank 0, before it meets: the order, and what it wants of the logits."""

    def hear(self, arena: Tensor) -> None:
        """In other ranks, before they meet: waits for an order. Blocks that come before it are put into `arena`."""

    def mirror(self, arena: Tensor, blocks: Sequence[int]) -> None:
        """In rank 0, before a step: blocks, as they are now, go to all hosts."""

    def exchange(self, name: str, joined: Tensor) -> None:
        """After a meeting of the stage: the columns of the stage's other hosts come, too."""

    def collect(self, name: str, joined: Tensor) -> None:
        """After a meeting of all: what the front wants of those of all hosts comes there."""

    def receive(self, states: Tensor) -> None:
        """In all ranks of the first stage of this host: what the host before has left."""

    def send(self, states: Tensor) -> None:
        """In the first rank of the only stage of this host: what it has left."""

    def end_step(self, parts: int, states: Tensor, kv: Sequence[Tensor]) -> None:
        """In all ranks: in rank 0 the states of the wanted rows are there, and what was written into blocks."""
        if self._room.team.rank == 0:
            self._room.expect(self._room.team.wait_for_end())


class SeveralHosts(GptHosts):
    def __init__(self, config: GptConfig, place: RankPlace, room: OrderRoom) -> None:
        super().__init__(room)
        self._extension: Any = native.load()
        shares = of_hosts(place, partial(GptShare.of, config))
        columns = [share.columns(config) for share in shares]
        self._spans = {name: [tuple(each[name]) for each in columns] for name in columns[0]}
        self._hosts = place.group_hosts(room.team, shares)
        self.before, self.after = self._hosts.before >= 0, self._hosts.after >= 0
        self._speaks = self._hosts.speaks
        self._kv: tuple[Sequence[Tensor], Any] | None = None

    def tell(self, wanted: Any = None) -> None:
        given = () if wanted is None else (wanted,)
        self._room.expect(self._hosts.tell(self._room.order, self._room.columns["hidden"], *given))

    def hear(self, arena: Tensor) -> None:
        if self._speaks:
            self._room.expect(self._hosts.hear(self._room.order, self._room.columns["hidden"], arena))

    def mirror(self, arena: Tensor, blocks: Sequence[int]) -> None:
        self._hosts.mirror(arena, torch.tensor(blocks, dtype=torch.int64))

    def exchange(self, name: str, joined: Tensor) -> None:
        if self._hosts.peers > 1:
            if self._speaks:
                self._room.expect(self._hosts.exchange(joined, self._spans[name]))
            self._room.expect(self._room.team.meet())

    def collect(self, name: str, joined: Tensor) -> None:
        if self._speaks:
            self._room.expect(self._hosts.collect(joined, self._spans[name]))

    def receive(self, states: Tensor) -> None:
        if self._speaks:
            self._room.expect(self._hosts.receive_states(states))
        self._room.expect(self._room.team.meet())

    def send(self, states: Tensor) -> None:
        self._room.expect(self._hosts.send_states(states))

    def end_step(self, parts: int, states: Tensor, kv: Sequence[Tensor]) -> None:
        if self._speaks:
            self._room.expect(self._hosts.end_step(self._room.order, parts, self._layers(kv), states))

    def _layers(self, kv: Sequence[Tensor]) -> Any:
        """The extension's handle of the arena. Every step passes the same list of tensors, so the handle is kept."""
        if self._kv is None or self._kv[0] is not kv:
            self._kv = (kv, self._extension.Kv(list(kv)))
        return self._kv[1]
