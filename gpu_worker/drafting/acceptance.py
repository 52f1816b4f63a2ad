"""How often drafts of one kind were right lately, and when to try again where they were not."""

WEIGHT = 0.2  # of a new draft; all earlier ones together have the rest
RETRY_TOKENS = 32  # after so many tokens of the branch one draft is tried, however bad the last ones were


class Acceptance:
    __slots__ = ("_retry_at", "share")

    def __init__(self, share: float = 0.4) -> None:
        self.share = share  # of the drafts whose predecessors were right
        self._retry_at = 0

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in what became of drafts: those after the first wrong one say nothing."""
        self.share = 1 - (1 - self.share) * (1 - WEIGHT) ** num_accepted
        if num_accepted < num_drafts:
            self.share *= 1 - WEIGHT

    def may_retry(self, num_tokens: int) -> bool:
        """Whether a branch of so many tokens tries a draft that does not seem worth it."""
        if num_tokens < self._retry_at:
            return False
        self._retry_at = num_tokens + RETRY_TOKENS
        return True
