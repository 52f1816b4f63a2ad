"""What swapping and recomputing cost follows what is measured."""

from gpu_worker.blocks.cost_model import CostModel


def test_the_cheaper_way_follows_what_is_measured() -> None:
    costs = CostModel(weight=1.0)
    costs.observe_copy(10_000, 1.0)
    costs.observe_prefill(100, 1.0)
    assert costs.swap_is_cheaper(4_000, 100)  # 0.8 s there and back against 1 s
    assert not costs.swap_is_cheaper(6_000, 100)
    costs.observe_prefill(0, 0.0)
    assert costs.prefill_tokens_per_s == 100


def test_a_copy_from_the_host_pool_goes_one_way() -> None:
    costs = CostModel(copy_bytes_per_s=1e4, prefill_tokens_per_s=100)
    assert costs.copy_is_cheaper(6_000, 100) and not costs.swap_is_cheaper(6_000, 100)
    assert not costs.copy_is_cheaper(11_000, 100)
