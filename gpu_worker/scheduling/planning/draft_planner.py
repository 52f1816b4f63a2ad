"""Which decodes of a step guess tokens, and how many.

A draft costs a row of the step, and slots. It gets a row if the row is likely enough to bring a token (`RowCosts`), and
slots where blocks are plenty: it takes them from nobody. What becomes of it changes no token, so all of this may look
at the clock.
"""

from gpu_worker.drafting.row_costs import RowCosts
from gpu_worker.drafting.text_lookup import TextLookup
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.scheduling.state.step import FORCED, LOOKUP, Chunk, StepPlan
from gpu_worker.scheduling.state.workload import Workload

MOST_DRAFTS = 16  # of a branch
DEAR = 0.8  # how likely a row has to be right where nothing is looked up any more: then a draft is seldom worth it


class DraftPlanner:
    def __init__(self, workload: Workload, costs: RowCosts) -> None:
        self._workload = workload
        self._costs = costs
        self._tables = workload.tables
        self._looks_up = workload.config.speculation == "lookup"
        self._num_rows, self._num_expected = 0, 0.0  # of the step being planned: rows, and tokens that they may bring

    def add(self, plan: StepPlan) -> None:
        """Gives some decodes of a plan drafts. They then stand after the other decodes."""
        work, config = self._workload, self._workload.config
        room = min(config.max_batch_sequences - plan.num_branches, config.max_batch_tokens - plan.num_tokens)
        if room <= 0 or work.turn is not None:
            return
        decodes = plan.chunks[: plan.num_decodes]
        self._num_rows, self._num_expected = plan.num_tokens, float(plan.num_tokens)
        if not self._looks_up or self._rows_are_dear:
            decodes = [chunk for chunk in decodes if chunk.branch.sequence.grammar is not None]
        for chunk in decodes:
            if room <= 0:
                break
            drafts, masks, drafter = self._drafts_of(chunk.branch, min(room, MOST_DRAFTS))
            drafts = drafts[: self._take_slots(chunk.branch, len(drafts), len(plan.chunks))]
            if drafts:
                chunk.add_drafts(drafts, masks[: len(drafts)], drafter)
                plan.num_drafted += 1
                plan.num_drafts += len(drafts)
                room -= len(drafts)
        if plan.num_drafted:
            self._put_last(plan)

    def _drafts_of(self, branch: Branch, room: int) -> tuple[list[int], list[bytes], str]:
        """At most `room` drafts of a branch, their masks if it has a grammar, and which drafter made them."""
        most = min(room, branch.last - len(branch.tokens))
        if most <= 0:
            return [], [], ""
        drafts, drafter, grammar = [], LOOKUP, branch.sequence.grammar
        if grammar is not None:
            branch.matcher = branch.matcher or grammar.matcher()
            if drafts := branch.matcher.forced(branch.tokens, branch.num_prompt)[:most]:
                drafter = FORCED
        if not drafts and self._looks_up and not self._rows_are_dear:
            drafts = self._look_up(branch, most)
        end = next((place for place, draft in enumerate(drafts) if draft in branch.stops), len(drafts))
        drafts, masks = drafts[:end], []
        if drafts and branch.matcher is not None:
            masks = branch.matcher.draft_masks(drafts)
            drafts = drafts[: len(masks)]
        return drafts, masks, drafter

    @property
    def _rows_are_dear(self) -> bool:
        return self._costs.least_share(self._num_rows, self._num_expected) > DEAR

    def _look_up(self, branch: Branch, most: int) -> list[int]:
        tokens = branch.tokens
        lookup = branch.lookup = branch.lookup or TextLookup(len(tokens))
        place = lookup.find(tokens)
        if not place:
            return []
        acceptance, costs = lookup.acceptance, self._costs
        count, chance = 0, acceptance.share
        while count < most and chance > costs.least_share(self._num_rows, self._num_expected):
            count += 1
            self._num_rows += 1
            self._num_expected += chance
            chance *= acceptance.share
        if not count and acceptance.may_retry(len(tokens)):
            count = 1
        return lookup.draft(tokens, place, count) if count else []

    def _take_slots(self, branch: Branch, count: int, num_others: int) -> int:
        """How many of `count` drafts have slots. It takes blocks for them if one is left for each other chunk."""
        tables, device = self._tables, self._tables.device
        num_slots = branch.num_computed + 1 + count
        missing = device.blocks_for(num_slots) - len(branch.blocks)
        if missing > 0:
            missing = min(missing, max(0, device.num_available - device.num_watermark - num_others))
            num_slots = min(num_slots, (len(branch.blocks) + missing) * device.block_size)
            tables.grow_table(branch, num_slots)
        return num_slots - branch.num_computed - 1

    @staticmethod
    def _put_last(plan: StepPlan) -> None:
        """Puts the decodes with drafts after those without."""
        decodes, others = plan.chunks[: plan.num_decodes], plan.chunks[plan.num_decodes :]
        plain: list[Chunk] = [chunk for chunk in decodes if not chunk.drafts]
        plan.chunks = [*plain, *(chunk for chunk in decodes if chunk.drafts), *others]
        plan.num_decodes = len(plain)
        plan.num_tokens += plan.num_drafts
