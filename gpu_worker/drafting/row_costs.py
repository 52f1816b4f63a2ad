"""How much longer a step takes with a row more, as measured, and so how sure a draft has to be to be worth its row."""

WEIGHT = 0.1  # of a measurement
MOST = 2.0  # a step that took longer by this factor than it should was disturbed, and counts as if it had taken this
FIRST_SHARE = 0.15  # of a row in a step of one row, before anything was measured
SCALE = 8.0  # rows that weigh as much as the fixed cost when both are corrected
MARGIN = 0.15  # of what is left to certainty: the figures are rough, and a draft costs something beside the runner


class RowCosts:
    """A step takes `fixed_s` and `row_s` for each row: the line through what was measured lately."""

    __slots__ = ("fixed_s", "row_s")

    def __init__(self) -> None:
        self.fixed_s = 1.0 - FIRST_SHARE
        self.row_s = 0.0  # 0: nothing was measured

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes in how long a step of decodes and drafts took."""
        if not self.row_s:
            self.row_s = seconds * FIRST_SHARE / (1 + FIRST_SHARE * (num_rows - 1))
            self.fixed_s = seconds - num_rows * self.row_s
            return
        expected = self.fixed_s + num_rows * self.row_s
        error = min(seconds, MOST * expected) - expected
        rows = num_rows / SCALE
        step = WEIGHT * error / (1 + rows * rows)
        self.fixed_s = max(step + self.fixed_s, 0.0)
        self.row_s = max(self.row_s + step * rows / SCALE, 0.01 * expected / (num_rows + 1))

    def least_share(self, num_rows: int, num_expected: float, draft_s: float = 0.0) -> float:
        """How likely one more token has to be that a step of `num_rows` rows brings by one more row.

        It brings `num_expected` tokens without it. The row must bring tokens as quickly as the others do. `draft_s` is
        how long it takes to make the draft.
        """
        row_s = self.row_s or FIRST_SHARE
        more_s = draft_s if self.row_s else 0.0
        share = (row_s + more_s) * num_expected / (self.fixed_s + num_rows * row_s)
        return share + MARGIN * (1 - share)
