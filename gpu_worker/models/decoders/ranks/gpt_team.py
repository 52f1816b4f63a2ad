"""A rank's part of a GPT-like decoder, and how it meets the others.

A rank computes the attention of some KV heads and some rows of every matrix; norms and sums of single numbers are
computed by all. A rank reads what others wrote before it comes to the next meeting, so no rank overwrites it too early.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.models.decoders.decoder import KeptLogits
from gpu_worker.models.decoders.gpt import GptConfig, GptDecoder
from gpu_worker.models.decoders.only_rank import OnlyRank
from gpu_worker.models.decoders.ranks.gpt_share import GptShare
from gpu_worker.models.decoders.ranks.order_room import LOGIT_ROWS, LOGITS, OrderRoom, cut_batch
from gpu_worker.models.decoders.ranks.place import RankPlace, TeamBroken
from gpu_worker.ops import TokenBatch, native

PARTS = 2  # of a step, for stages


class GptTeam(OnlyRank):
    def __init__(self, config: GptConfig, share: GptShare, place: RankPlace, dtype: torch.dtype) -> None:
        super().__init__(share.kv_heads.num)
        self.first_kv_head = share.kv_heads.first
        self._layers = range(share.layers.first, share.layers.first + share.layers.num)
        self._stages = place.stages
        self._vocab = config.vocab_size
        self._kept_logits = KeptLogits(config.vocab_size)
        queries, keys = share.queries(config), share.keys(config)
        self._spans = {
            "attended": queries,
            "q_norm": queries,
            "k_norm": keys,
            "out": share.hidden,
            "inner": share.inner,
            "down": share.hidden,
            "logits": share.vocab,
        }
        hidden, width = config.hidden_size, config.num_kv_heads * config.head_dim
        widths = {"attended": hidden, "q_norm": hidden, "k_norm": width, "out": hidden, "down": hidden, "x": hidden}
        widths["inner"] = config.intermediate_size
        columns = {name: (place.tokens, columns, dtype) for name, columns in widths.items()}
        columns |= {"hidden": (LOGIT_ROWS, hidden, dtype), "logits": (LOGIT_ROWS, self._vocab, torch.float32)}
        plan_bytes = place.plan_bytes(config.context_tokens)
        start = native.team_bytes()
        memory = place.team_memory(start + OrderRoom.num_bytes(plan_bytes, columns))
        self._room = OrderRoom(memory[start:], plan_bytes, columns)
        self._team = place.team(memory)
        self._rows = slice(0, 0)  # of the step's tokens: those of the part that is being computed

    def forward(self, decoder: GptDecoder, batch: TokenBatch, kv: Sequence[Tensor], rows: Tensor) -> Tensor:
        self._room.order_forward(batch)
        self._expect(self._team.meet_all())
        x = self._compute(decoder, batch, kv)
        if self._stages > 1:
            self._expect(self._team.wait_for_end())
            x = self._room.columns["x"][: batch.num_tokens]
        return decoder.normed(x[rows])

    def logits(self, decoder: GptDecoder, hidden: Tensor) -> Tensor:
        logits = self._kept_logits.rows(hidden.shape[0])
        for rows, into in zip(hidden.split(LOGIT_ROWS), logits.split(LOGIT_ROWS), strict=True):
            self._room.columns["hidden"][: len(rows)] = rows
            self._room.order_logits(len(rows))
            self._expect(self._team.meet_all())
            into[:] = self._share_of_logits(decoder, len(rows))
        return logits

    def serve(self, decoder: GptDecoder, kv: Sequence[Tensor]) -> None:
        """In a rank other than 0: takes part in what that computes, until the team is broken."""
        try:
            while self._team.meet_for_orders():
                if self._room.order == LOGITS:
                    self._share_of_logits(decoder, self._room.num_rows)
                else:
                    self._compute(decoder, self._room.batch(), kv)
        except TeamBroken:
            return

    def join(self, name: str, own: Tensor) -> Tensor:
        joined = self._room.columns[name][self._rows]
        self.own(name, joined).copy_(own)
        self._expect(self._team.meet())
        return joined

    def own(self, name: str, joined: Tensor) -> Tensor:
        first, num = self._spans[name]
        return joined[:, first : first + num]

    def _compute(self, decoder: GptDecoder, batch: TokenBatch, kv: Sequence[Tensor]) -> Tensor:
        """The own part of the own layers: the states after them."""
        first, num = self.first_kv_head, self.num_kv_heads
        heads = [layer[:, first : first + num] for layer in kv]
        count = batch.num_tokens
        parts = min(PARTS, count) if self._stages > 1 else 1
        x = self._room.columns["x"]
        for part in range(parts):
            begin, end = (count * place // parts for place in (part, part + 1))
            self._rows = slice(begin, end)
            tokens = cut_batch(batch, begin, end) if parts > 1 else batch
            if self._stages == 1:
                return decoder.run_layers(self._layers, decoder.embed(tokens), tokens, heads)
            self._expect(self._team.wait_for_part())
            states = decoder.embed(tokens) if self._team.stage == 0 else x[self._rows].clone()
            states = decoder.run_layers(self._layers, states, tokens, heads)
            if self._team.rank_in_stage == 0:
                x[self._rows] = states
                self._team.pass_on()
        return x[:count]

    def _share_of_logits(self, decoder: GptDecoder, num_rows: int) -> Tensor:
        logits = self._room.columns["logits"][:num_rows]
        self.own("logits", logits).copy_(decoder.own_logits(self._room.columns["hidden"][:num_rows]))
        self._expect(self._team.meet_all())
        return logits

    def _expect(self, whole: bool) -> None:
        if not whole:
            raise TeamBroken(self._team.trouble)
