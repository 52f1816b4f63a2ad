"""A rank's part of a GPT-like decoder, and how it meets the others.

A rank computes the attention of some KV heads and some rows of every matrix; norms and sums of single numbers are
computed by all. A rank reads what others wrote before it comes to the next meeting, so no rank overwrites it too early.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import KeptLogits
from gpu_worker.models.decoders.decoder_part import DecoderPart
from gpu_worker.models.decoders.gpt import GptConfig, GptDecoder
from gpu_worker.models.decoders.ranks.gpt_hosts import GptHosts, SeveralHosts
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.order_room import OrderRoom
from gpu_worker.models.decoders.ranks.place import RankPlace, TeamBroken
from gpu_worker.ops import TokenBatch, native

PARTS = 2  # of a step, for stages


class GptTeam(DecoderPart):
    def __init__(self, config: GptConfig, share: GptShare, place: RankPlace, dtype: torch.dtype) -> None:
        super().__init__(share.kv_heads.num)
        self.first_kv_head = share.kv_heads.first
        self._layers = range(share.layers.first, share.layers.first + share.layers.num)
        self._stages, self._stages_here = place.stages, place.stages_here
        self._kept_logits = KeptLogits(config.vocab_size)
        self._spans = share.columns(config)
        self._room = OrderRoom(place, config.context_tokens, _columns(config, place, dtype))
        self._team = self._room.team
        self._hosts = SeveralHosts(config, place, self._room) if place.hosts > 1 else GptHosts(self._room)
        self._rows = slice(0, 0)  # of the step's tokens: those of the part that is being computed

    def forward(self, decoder: GptDecoder, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        self._room.order_forward(batch, rows)
        self._hosts.tell()
        self._room.expect(self._team.meet_all())
        try:
            return decoder.normed(self._compute(decoder, batch, kv)[rows])
        except BaseException:  # others are in the middle of it, and wait for columns
            self._team.break_off()
            raise

    def logits(self, decoder: GptDecoder, hidden: Tensor, wanted: Any = None) -> Tensor:
        """`wanted`: a WantedLogits of the rows; those of other hosts are then -inf but for these."""
        logits, at_once = self._kept_logits.rows(hidden.shape[0]), len(self._room.columns["hidden"])
        for first, into in zip(range(0, len(hidden), at_once), logits.split(at_once), strict=True):
            rows = hidden[first : first + at_once]
            self._room.columns["hidden"][: len(rows)] = rows
            self._room.order.order_logits(len(rows))
            self._hosts.tell(wanted and wanted.rows(first, len(rows)))
            self._room.expect(self._team.meet_all())
            into[:] = self._share_of_logits(decoder, len(rows))
        return logits

    def serve(self, decoder: GptDecoder, kv: Sequence[Tensor], arena: Tensor) -> None:
        """In a rank other than 0: takes part in what that computes, until the team is broken."""
        try:
            while True:
                self._hosts.hear(arena)
                self._room.expect(self._team.meet_for_orders())
                if self._room.order.wants_logits:
                    self._share_of_logits(decoder, self._room.order.num_rows)
                else:
                    self._compute(decoder, self._room.batch(kv[0].device), kv)
        except TeamBroken:
            return

    def mirror(self, arena: Tensor, blocks: Sequence[int]) -> None:
        """In rank 0 of several hosts, before a step: sends blocks, as they are now, to the other hosts."""
        self._hosts.mirror(arena, blocks)

    def join(self, name: str, own: Tensor) -> Tensor:
        joined = self._room.columns[name][self._rows]
        self.own(name, joined).copy_(own)
        self._room.expect(self._team.meet())
        self._hosts.exchange(name, joined)
        return joined

    def own(self, name: str, joined: Tensor) -> Tensor:
        first, num = self._spans[name]
        return joined[:, first : first + num]

    def _compute(self, decoder: GptDecoder, batch: TokenBatch, kv: Sequence[Tensor]) -> Tensor:
        """The own part of the own layers. In rank 0 the states after all layers, at least of the wanted rows."""
        first, num = self.first_kv_head, self.num_kv_heads
        heads = [layer[:, first : first + num] for layer in kv]
        count = batch.num_tokens
        parts = min(PARTS, count) if self._stages > 1 else 1
        states = whole = self._room.columns["x"][:count]
        for part in range(parts):
            begin, end = (count * place // parts for place in (part, part + 1))
            self._rows = slice(begin, end)
            tokens = _cut_batch(batch, begin, end) if parts > 1 else batch
            states = decoder.run_layers(self._layers, self._begin(decoder, tokens, whole[begin:end]), tokens, heads)
            self._hand_on(states, whole[begin:end])
        self._hosts.end_step(parts, whole, kv)
        return states if self._stages == 1 else whole

    def _begin(self, decoder: GptDecoder, tokens: TokenBatch, passed: Tensor) -> Tensor:
        """The states before the own layers."""
        if self._stages_here > 1:
            self._room.expect(self._team.wait_for_part())
        if self._team.stage == 0:
            if not self._hosts.before:
                return decoder.embed(tokens)
            self._hosts.receive(passed)
        return passed.clone()

    def _hand_on(self, states: Tensor, passed: Tensor) -> None:
        """To the stage that has the next layers, or to the end of the step."""
        if self._stages > 1 and self._team.rank_in_stage == 0:
            passed.copy_(states)
            if self._stages_here > 1:
                self._team.pass_on()
            elif self._hosts.after:
                self._hosts.send(passed)

    def _share_of_logits(self, decoder: GptDecoder, num_rows: int) -> Tensor:
        logits = self._room.columns["logits"][:num_rows]
        self.own("logits", logits).copy_(decoder.own_logits(self._room.columns["hidden"][:num_rows]))
        self._room.expect(self._team.meet_all())
        self._hosts.collect("logits", logits)
        return logits


def _columns(config: GptConfig, place: RankPlace, dtype: torch.dtype) -> dict[str, tuple[int, int, torch.dtype]]:
    """The activations that ranks exchange, with the columns of all."""
    extension: Any = native.load()
    hidden, logit_rows = config.hidden_size, extension.ORDER_ROWS  # so many at once
    widths = dict.fromkeys(("attended", "q_norm", "out", "down", "x"), hidden)
    widths |= {"k_norm": config.num_kv_heads * config.head_dim, "inner": config.intermediate_size}
    return {
        **{name: (place.tokens, width, dtype) for name, width in widths.items()},
        "hidden": (logit_rows, hidden, dtype),
        "logits": (logit_rows, config.vocab_size, torch.float32),
    }


def _cut_batch(batch: TokenBatch, begin: int, end: int) -> TokenBatch:
    """Some tokens of a step. Earlier tokens of a sequence that is divided are in an earlier part."""
    starts = batch.cu_q.tolist()
    there = [s for s in range(len(starts) - 1) if starts[s] < end and starts[s + 1] > begin]
    first, last = there[0], there[-1] + 1
    cu_q = batch.cu_q[first : last + 1].clamp(begin, end) - begin
    seq_lens = batch.seq_lens[first:last] - (batch.cu_q[first + 1 : last + 1] - end).clamp(min=0)
    return TokenBatch(
        token_ids=batch.token_ids[begin:end],
        positions=batch.positions[begin:end],
        slots=batch.slots[begin:end],
        rows=batch.rows,
        cu_q=cu_q,
        seq_lens=seq_lens,
        block_tables=batch.block_tables[first:last],
        q_lens=cu_q.diff().tolist(),
        kv_lens=seq_lens.tolist(),
    )
