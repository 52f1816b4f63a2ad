"""What a row costs is learned from steps, and decides how sure a draft has to be."""

import random

import pytest

from gpu_worker.drafting.acceptance import RETRY_TOKENS, Acceptance
from gpu_worker.drafting.row_costs import MARGIN, RowCosts


@pytest.mark.parametrize(("fixed_ms", "row_ms"), [(8.0, 0.5), (3.0, 0.9), (0.1, 2.0), (20.0, 0.01)])
def test_the_line_is_found_among_disturbed_steps(fixed_ms: float, row_ms: float) -> None:
    rng, costs = random.Random(1), RowCosts()
    for _ in range(3000):
        rows = rng.choice((1, 1, 2, 5, 9, 17))
        disturbed = 10 if rng.random() < 0.02 else 1
        costs.observe(rows, (fixed_ms + rows * row_ms) / 1000 * rng.uniform(0.97, 1.03) * disturbed)
    for rows in (1, 4, 12):
        share = row_ms / (fixed_ms + rows * row_ms)
        assert costs.least_share(rows, 1.0) == pytest.approx(share + MARGIN * (1 - share), rel=0.3, abs=0.03)


def test_a_row_is_dearer_where_more_rows_bring_tokens() -> None:
    costs = RowCosts()
    shares = [costs.least_share(rows, float(rows)) for rows in range(1, 64)]
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] > 0.9


def test_drafts_end_after_wrong_ones_and_are_tried_again() -> None:
    acceptance, costs = Acceptance(), RowCosts()
    for _ in range(8):
        acceptance.learn(3, 0)
    assert acceptance.share < costs.least_share(1, 1.0)
    tried = [tokens for tokens in range(200) if acceptance.may_retry(tokens)]
    assert tried == list(range(0, 200, RETRY_TOKENS))
    for _ in range(4):
        acceptance.learn(1, 1)
    assert acceptance.share > 0.5
