"""Which decodes of a step guess tokens, and how many.

A draft costs a row of the step, and slots. It gets a row if the row is likely enough to bring a token (`RowCosts`), and
slots where blocks are plenty: it takes them from nobody. Branches are served in the order of the rows that they have
had for drafts, right or wrong, so none has more than its share of the rows that are left. What becomes of drafts
changes no token, so all of this may look at the clock.
"""

from gpu_worker.drafting.acceptance import Acceptance
from gpu_worker.drafting.draft_model import DraftedBranch, DraftModel, Question
from gpu_worker.drafting.drafts import FORCED, MODEL, Drafts, Lookup
from gpu_worker.drafting.recent_outputs import RecentLookup
from gpu_worker.drafting.row_costs import RowCosts
from gpu_worker.drafting.text_lookup import TextLookup
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.scheduling.state.step import Chunk, StepPlan
from gpu_worker.scheduling.state.workload import Workload

MOST_DRAFTS = 16  # of a branch
# Decodes with a grammar up to which each step asks what is forced. Where there are more, that takes longer than it
# saves: then a step's masks, which are computed beside the model, also say what is forced from the next token on.
FEW = 4
DEAR = 0.8  # how likely a row has to be right where nothing is looked up any more: then a draft is seldom worth it
NO_DRAFTS = Drafts([])


class DraftPlanner:
    def __init__(self, workload: Workload, costs: RowCosts, model: DraftModel | None = None) -> None:
        self._workload = workload
        self._costs = costs
        self._model = model
        self._tables = workload.tables
        self._looks_up = workload.config.speculation in ("lookup", "recent")
        self._num_rows, self._num_expected = 0, 0.0  # of the step being planned: rows, and tokens that they may bring
        self._least_charge = 0  # in rows: of the branch that was served last, before it was

    def add(self, plan: StepPlan) -> None:
        """Gives some decodes of a plan drafts. They then stand after the other decodes."""
        work, config = self._workload, self._workload.config
        if work.recent is not None:
            work.recent.index_some()
        room = min(config.max_batch_sequences - plan.num_branches, config.max_batch_tokens - plan.num_tokens)
        if room <= 0 or work.turn is not None:
            return
        decodes = [chunk for chunk in plan.chunks[: plan.num_decodes] if not chunk.branch.sequence.leaves]
        self._num_rows, self._num_expected = plan.num_tokens, float(plan.num_tokens)
        constrained = [chunk for chunk in decodes if chunk.branch.sequence.grammar is not None]
        plan.foresees = MOST_DRAFTS if len(constrained) > FEW else 0
        if not self._looks_up or self._rows_are_dear:
            decodes = [chunk for chunk in constrained if not plan.foresees or _has_foreseen(chunk)]
        unguessed: list[Chunk] = []
        for chunk in sorted(decodes, key=self._charge):
            if room <= 0:
                break
            drafts = self._drafts_of(chunk.branch, min(room, MOST_DRAFTS), foreseen=plan.foresees > 0)
            if not drafts.tokens:
                unguessed.append(chunk)
            room -= self._give(plan, chunk, drafts)
        if self._model is not None and unguessed and room > 0:
            for chunk, drafts in self._ask_model(self._model, unguessed, room):
                self._give(plan, chunk, drafts)
        if plan.num_drafted:
            self._put_last(plan)

    def _give(self, plan: StepPlan, chunk: Chunk, drafts: Drafts) -> int:
        """Gives a chunk those of the drafts that may be drawn and have slots. Returns how many."""
        branch, tokens = chunk.branch, drafts.tokens
        tokens = tokens[: next((place for place, draft in enumerate(tokens) if draft in branch.stops), None)]
        masks = drafts.masks or []
        if tokens and branch.matcher is not None and drafts.masks is None:
            masks = branch.matcher.draft_masks(branch.tokens, branch.num_prompt, tokens)
            tokens = tokens[: len(masks)]
        count = self._take_slots(branch, len(tokens), len(plan.chunks))
        if count:
            chunk.add_drafts(drafts._replace(tokens=tokens[:count]), masks[:count])
            self._charge_rows(chunk, count)
            plan.num_drafted += 1
            plan.num_drafts += count
        return count

    def _charge(self, chunk: Chunk) -> int:
        """Of how many rows for drafts its branch is to count as having had. A new branch has had as many as others."""
        return max(chunk.branch.draft_rows, self._least_charge)

    def _charge_rows(self, chunk: Chunk, count: int) -> None:
        self._least_charge = self._charge(chunk)
        chunk.branch.draft_rows = self._least_charge + count

    def _drafts_of(self, branch: Branch, room: int, *, foreseen: bool) -> Drafts:
        """At most `room` drafts of a branch, of what costs next to nothing to guess."""
        most = min(room, branch.last - len(branch.tokens))
        if most <= 0:
            return NO_DRAFTS
        drafts, grammar = NO_DRAFTS, branch.sequence.grammar
        if grammar is not None:
            matcher = branch.matcher = branch.matcher or grammar.matcher()
            if foreseen:
                tokens, masks = matcher.foreseen(branch.tokens, branch.num_prompt)
                drafts = Drafts(tokens[:most], FORCED, masks=masks)
            else:
                drafts = Drafts(matcher.forced(branch.tokens, branch.num_prompt)[:most], FORCED)
        if not drafts.tokens and self._looks_up and not self._rows_are_dear:
            drafts = self._look_up(branch, most)
        return drafts

    def _ask_model(self, model: DraftModel, chunks: list[Chunk], room: int) -> list[tuple[Chunk, Drafts]]:
        """Drafts of a model for branches of which nothing else is guessed."""
        asked: list[tuple[Chunk, Question]] = []
        for chunk in chunks:
            branch = chunk.branch
            drafted = branch.drafted
            if drafted is None:
                params = branch.sequence.params
                drafted = branch.drafted = DraftedBranch.of(params, branch.num_prompt, branch.index)
            most = min(room, MOST_DRAFTS, branch.last - len(branch.tokens))
            if most <= 0 or self._rows_are_dear:
                continue
            if count := self._count(drafted.acceptance, len(branch.tokens), most, model.token_s):
                asked.append((chunk, Question(drafted, branch.tokens, count)))
                room -= count
        model.answer([question for _, question in asked])
        return [(chunk, Drafts(asking.drafts, MODEL, asking.branch.acceptance)) for chunk, asking in asked]

    @property
    def _rows_are_dear(self) -> bool:
        return self._costs.least_share(self._num_rows, self._num_expected) > DEAR

    def _look_up(self, branch: Branch, most: int) -> Drafts:
        """Drafts by the lookup that is most likely to be right; of two like that by the longer match."""
        tokens, best, longest = branch.tokens, None, 0
        branch.lookups = branch.lookups or self._new_lookups(branch)
        for lookup in branch.lookups:
            length = lookup.find(tokens)
            if length and (best is None or (lookup.acceptance.share, length) > (best.acceptance.share, longest)):
                best, longest = lookup, length
        if best is None or not (count := self._count(best.acceptance, len(tokens), most)):
            return NO_DRAFTS
        return Drafts(best.draft(tokens, count), best.name, best.acceptance)

    def _new_lookups(self, branch: Branch) -> tuple[Lookup, ...]:
        text, recent = TextLookup(len(branch.tokens)), self._workload.recent
        return (text, RecentLookup(recent, branch.sequence.root)) if recent is not None else (text,)

    def _count(self, acceptance: Acceptance, num_tokens: int, most: int, draft_s: float = 0.0) -> int:
        """How many drafts are worth their rows, which are taken. Now and then one is, whatever it seems to be worth."""
        count, chance = 0, acceptance.share
        while count < most and chance > self._costs.least_share(self._num_rows, self._num_expected, draft_s):
            count += 1
            self._num_rows += 1
            self._num_expected += chance
            chance *= acceptance.share
        return count or int(acceptance.may_retry(num_tokens))

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


def _has_foreseen(chunk: Chunk) -> bool:
    matcher = chunk.branch.matcher
    return matcher is not None and matcher.has_foreseen
