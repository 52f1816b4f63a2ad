"""The heads of a decoder, divided between ranks: each is one rank's, and no rank of a host has many more."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.models.decoders.ranks.llama_share import LlamaShare
from gpu_worker.models.decoders.ranks.place import RankPlace, ShareSpan


class SharedOut:
    """A configuration with so many heads, and enough of all else."""

    intermediate_size = hidden_size = vocab_size = 4096
    num_layers, head_dim, experts, expert_layers = 8, 16, None, ()

    def __init__(self, num_kv_heads: int, group: int) -> None:
        self.num_kv_heads, self.num_heads = num_kv_heads, num_kv_heads * group
        self.qkv_rows = self.num_heads * 16, num_kv_heads * 16, num_kv_heads * 16


def ranks_of(config: Any, ranks: int, stages: int, hosts: int) -> list[LlamaShare]:
    place: Any = RankPlace(
        rank=0,
        size=ranks * stages,
        stages=stages,
        hosts=hosts,
        tokens=16,
        sequences=4,
        block_size=16,
        patience_s=1.0,
        team_memory=lambda _: pytest.fail("is not asked for"),
        arena_memory=lambda _: pytest.fail("is not asked for"),
    )
    return [LlamaShare.of(config, replace(place, rank=rank)) for rank in range(ranks * stages)]


def follow(spans: list[ShareSpan], whole: ShareSpan) -> bool:
    """Whether each begins where the one before ends, from the beginning of the whole to its end."""
    ends = [whole.first, *(span.first + span.num for span in spans)]
    return [span.first for span in spans] == ends[:-1] and ends[-1] == whole.first + whole.num


@given(
    st.builds(SharedOut, st.integers(1, 12), st.integers(1, 8)),
    st.sampled_from(
        [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2), (6, 1, 2), (4, 1, 1), (5, 1, 1), (6, 1, 3)]
    ),
)
def test_each_head_is_one_ranks(config, size):
    ranks, stages, hosts = size
    shares = ranks_of(config, *size)
    here = ranks // max(1, hosts // stages)  # ranks of a stage on a host
    group = config.num_heads // config.num_kv_heads
    hosts_heads = []
    for first in range(0, len(shares), here):
        host = shares[first : first + here]
        end = host[-1].kv_heads.first + host[-1].kv_heads.num
        heads = ShareSpan(host[0].kv_heads.first, end - host[0].kv_heads.first)
        hosts_heads.append(heads)
        assert follow([share.queries for share in host], ShareSpan(heads.first * group, heads.num * group))
        assert follow([share.keys for share in host], heads)
        assert follow([share.values for share in host], heads)
        own = [share.queries.num + share.keys.num + share.values.num for share in host]
        assert max(own) - min(own) <= 1
        if heads.num % here == 0:
            assert follow([share.kv_heads for share in host], heads)
        else:
            assert {share.kv_heads for share in host} == {heads}
    for stage in range(stages):
        of_stage = len(hosts_heads) // stages
        assert follow(hosts_heads[stage * of_stage : (stage + 1) * of_stage], ShareSpan(0, config.num_kv_heads))
