"""What becomes of a step's output: tokens are appended, full blocks hashed, branches forked, finished and freed."""

import sys
from array import array

from gpu_worker.scheduling.state.beam import BeamCandidate, Hypothesis, expand
from gpu_worker.scheduling.state.pooling import Pooling, PoolingEnd
from gpu_worker.scheduling.state.sequence import RUNNING, Branch, Hold, Sequence
from gpu_worker.scheduling.state.step import BeamProgress, Chunk, StepItems, StepPlan, branch_item
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import BAD_LOGITS, NOTHING_LEFT, StepOutput
from octavo.request.errors import BadLogits
from octavo.request.sampling import FinishReason, TokenScore
from octavo.request.step_item import StepItem

NONE, STOP, LENGTH, ERROR = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR

PROGRESS_TOKENS = 16  # how often a search tells of its progress: when the store counts it (calls.PROOF_TOKENS)


class Committer:
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._lists = workload.lists
        self._tables = workload.tables

    def apply(self, plan: StepPlan, output: StepOutput, result: StepItems) -> None:
        """Takes in the output of a plan. A sequence that has ended since it was planned is left alone."""
        self._workload.num_decodes += plan.num_decodes + plan.num_drafted
        self._decodes(plan, output, result.items)
        sample = plan.num_decodes
        beams: dict[Sequence, list[tuple[Branch, int, TokenScore]]] = {}
        for number in range(plan.num_decodes, len(plan.chunks)):
            chunk = plan.chunks[number]
            branch, num_samples = chunk.branch, len(chunk.samples)
            if chunk.drafts:
                self._drafted(chunk, output, sample, result.items)
            elif branch.state is RUNNING:
                self._computed(chunk, output.scored.get(number, []))
                if branch.sequence.pooling is not None:
                    self._pooled(chunk, branch.sequence.pooling, output.pooled.get(number))
                tokens = output.token_ids[sample : sample + len(chunk.samples)]
                scores = [output.scores.get(sample + i) for i in range(len(chunk.samples))]
                if branch.sequence.search is None:
                    self._sampled(chunk, tokens, scores, result.items)
                elif tokens:
                    score = scores[0] or TokenScore(tokens[0], 0.0)
                    beams.setdefault(branch.sequence, []).append((branch, tokens[0], score))
            sample += num_samples
        for sequence, offers in beams.items():
            self._advance_beams(sequence, offers, result)

    def _decodes(self, plan: StepPlan, output: StepOutput, items: list[StepItem]) -> None:
        """Appends a token to each branch that decodes: the steady state, kept lean."""
        lists, tables = self._lists, self._tables
        mask = tables.device.block_size - 1
        append, scores = items.append, output.scores
        for sample, (chunk, token) in enumerate(zip(plan.chunks[: plan.num_decodes], output.token_ids, strict=False)):
            branch = chunk.branch
            if branch.state is not RUNNING:
                continue
            score = scores.get(sample) if scores else None
            if token in branch.stops and self._stop(branch, token, score, items):
                continue
            branch.tokens.append(token)
            chunk.start = computed = branch.num_computed + 1
            branch.num_computed = computed
            if not computed & mask:
                tables.seal_blocks(branch)
            if computed >= branch.last:
                append(self._end(branch, token, score, LENGTH))
                continue
            if computed >= branch.slots_end:
                lists.need_slot(branch)
            sequence = branch.sequence
            item = StepItem(sequence.seq_id, sequence.epoch, branch.index, computed - branch.num_prompt, (token,))
            append(item)
            if score is not None:
                self._score(branch, score, item)

    def _stop(self, branch: Branch, token: int, score: TokenScore | None, items: list[StepItem]) -> bool:
        """Ends the branch by a stop token or a mark. False if it goes on: the token is not appended then."""
        if token == NOTHING_LEFT and branch.matcher is not None:
            failure = branch.matcher.failure_after(branch.tokens, branch.num_prompt)
            items += self._workload.end(branch.sequence, ERROR, failure)
            return True
        if token == BAD_LOGITS:
            failure = BadLogits(
                f"branch {branch.index}: the model gave no finite logit after {len(branch.tokens)} tokens; "
                "no other sequence is affected"
            ).failure()
            items += self._workload.end(branch.sequence, ERROR, failure)
            return True
        if branch.num_output < branch.sequence.params.min_tokens:
            return False
        branch.tokens.append(token)
        if branch.num_computed < len(branch.tokens) - 1:  # a decode: its last token was computed in this step
            branch.num_computed = len(branch.tokens) - 1
            self._tables.seal_blocks(branch)
        items.append(self._end(branch, token, score, STOP))
        return True

    def _end(self, branch: Branch, token: int, score: TokenScore | None, reason: FinishReason) -> StepItem:
        """The last item of a branch whose last token has been appended."""
        item = branch_item(branch, (token,), reason)
        if score is not None:
            self._score(branch, score, item)
        self._workload.finish(branch)
        return item

    def _score(self, branch: Branch, score: TokenScore, item: StepItem) -> None:
        params = branch.sequence.params
        branch.cumulative_logprob += score.rank_logprob
        if params.logprobs is not None and len(item.scores) + 1 == len(item.token_ids):
            item.scores = (*item.scores, score)
        if params.ranked or (item.finish and params.summed):
            item.cumulative_logprob = branch.cumulative_logprob

    # Drafts

    def _drafted(self, chunk: Chunk, output: StepOutput, sample: int, items: list[StepItem]) -> None:
        """Appends the drafts that were drawn, and the first token that was drawn in place of one or after all of them.

        All happens that would have happened in so many steps.
        """
        branch, drafts, tables = chunk.branch, chunk.drafts, self._tables
        if branch.state is not RUNNING:
            return
        found: list[tuple[int, TokenScore | None]] = []
        drawn = output.token_ids[sample : sample + len(chunk.samples)]
        num_accepted = next((place for place, draft in enumerate(drafts) if drawn[place] != draft), len(drafts))
        self._note_drafts(chunk, num_accepted)
        for place, token in enumerate(drawn[: num_accepted + 1]):
            score = output.scores.get(sample + place)
            if token in branch.stops:
                self._append(branch, found, items)
                if self._stop(branch, token, score, items):
                    break
            branch.tokens.append(token)
            branch.num_computed += 1
            if not branch.num_computed & tables.device.block_size - 1:
                tables.seal_blocks(branch)
            if branch.num_computed >= branch.last:
                self._append(branch, found, items, before=1)
                items.append(self._end(branch, token, score, LENGTH))
                break
            found.append((token, score))
        chunk.end_drafts()
        if branch.state is RUNNING:
            self._append(branch, found, items)
            tables.give_back_unused(branch)
            if branch.num_computed >= branch.slots_end:
                self._lists.need_slot(branch)

    def _append(
        self, branch: Branch, found: list[tuple[int, TokenScore | None]], items: list[StepItem], before: int = 0
    ) -> None:
        """Makes an item of tokens that have been appended, `before` so many others, and empties the list of them."""
        if not found:
            return
        sequence = branch.sequence
        tokens = tuple(token for token, _ in found)
        first = branch.num_output - before - len(tokens)
        item = StepItem(sequence.seq_id, sequence.epoch, branch.index, first, tokens)
        items.append(item)
        scores = [score for _, score in found if score is not None]
        for score in scores:
            branch.cumulative_logprob += score.rank_logprob
        if scores and sequence.params.logprobs is not None:
            item.scores = tuple(scores)
        if scores and sequence.params.ranked:
            item.cumulative_logprob = branch.cumulative_logprob
        found.clear()

    def _note_drafts(self, chunk: Chunk, num_accepted: int) -> None:
        work, branch = self._workload, chunk.branch
        branch.num_drafts += len(chunk.drafts)
        branch.num_accepted_drafts += num_accepted
        work.num_drafts[chunk.drafter] += len(chunk.drafts)
        work.num_accepted_drafts[chunk.drafter] += num_accepted
        if chunk.acceptance is not None:
            chunk.acceptance.learn(len(chunk.drafts), num_accepted)

    # Prompts

    def _computed(self, chunk: Chunk, scored: list[TokenScore]) -> None:
        """Takes in that the keys and values of a chunk are written, and adds up the scores of its known tokens."""
        branch = chunk.branch
        branch.num_computed = chunk.start + chunk.length
        self._tables.seal_blocks(branch)
        for position, score in enumerate(scored, chunk.score_from):
            if position < branch.num_prompt:
                branch.sequence.prompt_scores.append(score)
            else:
                branch.cumulative_logprob += score.rank_logprob
                if branch.num_to_repeat and branch.sequence.params.logprobs is not None:
                    branch.repeated_scores.append(score)
        if scored:
            known = len(branch.tokens)  # sampling scores the tokens that it adds after these
            branch.first_unscored = chunk.score_end if chunk.score_end < known else sys.maxsize
        if branch.num_computed == branch.prefill_end:
            self._lists.end_prefill(branch)

    def _sampled(self, chunk: Chunk, tokens: list[int], scores: list[TokenScore | None], items: list[StepItem]) -> None:
        """Gives the branches of a complete prompt their tokens; they decode from now on."""
        if not tokens:
            return
        first, work = chunk.branch, self._workload
        for branch in chunk.samples:
            if branch is not first:
                work.fork(first, branch)
        first.sequence.holds.discard(Hold.FORKS)
        for branch, token, score in zip(chunk.samples, tokens, scores, strict=True):
            if branch.state is not RUNNING:  # a sibling had bad logits
                continue
            if token in branch.stops and self._stop(branch, token, score, items):
                continue
            branch.tokens.append(token)
            if len(branch.tokens) > branch.last:
                items.append(self._end(branch, token, score, LENGTH))
                continue
            item = branch_item(branch, (token,))
            if score is not None:
                self._score(branch, score, item)
            items.append(item)
            self._lists.add_decode(branch)

    def _pooled(self, chunk: Chunk, pooling: Pooling, values: "array[float] | None") -> None:
        """Takes in what a chunk brought of hidden states. The sequence ends with its last one."""
        if values is None:
            return
        if pooling.params.needs_all_rows:
            pooling.total = values
        if chunk.start + chunk.length == len(chunk.branch.tokens):
            pooling.end(PoolingEnd(values, chunk.branch.sequence.cached_tokens or 0))
            self._workload.finish(chunk.branch)

    # Beams

    def _advance_beams(
        self, sequence: Sequence, offers: list[tuple[Branch, int, TokenScore]], result: StepItems
    ) -> None:
        """Takes the offers of a search's beams: some candidates go on, some are complete."""
        search = sequence.search
        if search is None:
            return
        for branch, token, score in offers:
            if token == BAD_LOGITS:
                self._stop(branch, token, score, result.items)
                return
        beams = [branch for branch, _, _ in offers]
        length = beams[0].num_output + 1
        candidates = expand([beam.cumulative_logprob for beam in beams], [score for _, _, score in offers])
        going, complete = search.select(candidates, length, [beam.text for beam in beams])
        at_end = length >= search.max_tokens
        for candidate in complete + (going if at_end else []):
            parent = beams[candidate.parent]
            token_ids = (*parent.output, candidate.score.token_id)
            scores = (*parent.scores, candidate.score) if parent.scores is not None else ()
            finish = STOP if candidate in complete else LENGTH
            search.keep(
                Hypothesis(token_ids, candidate.total, search.normalize(candidate.total, length), finish, scores)
            )
        if at_end or search.decided([candidate.total for candidate in going], length):
            result.items += self._workload.end(sequence, NONE)
            return
        self._fork_beams(sequence, beams, going)
        if length % PROGRESS_TOKENS == 0:
            result.progress.append(BeamProgress(sequence, length))

    def _fork_beams(self, sequence: Sequence, beams: list[Branch], going: list[BeamCandidate]) -> None:
        """Makes the beams of the next step: a beam's first candidate goes on in its branch, the others fork from it."""
        work = self._workload
        heirs: set[int] = set()
        chosen: list[Branch] = []
        for candidate in going:
            parent = beams[candidate.parent]
            if candidate.parent in heirs:
                beam = Branch(sequence, 0, parent.tokens.copy(), parent.num_prompt)
                beam.stops, beam.last = parent.stops, parent.last
                beam.scores = parent.scores.copy() if parent.scores is not None else None
                beam.text = parent.text.fork() if parent.text is not None else None
                work.fork(parent, beam)
            else:
                heirs.add(candidate.parent)
                beam = parent
            chosen.append(beam)
        for index, beam in enumerate(chosen):
            beam.index = index
        sequence.branches = chosen
        if barren := [beam for number, beam in enumerate(beams) if number not in heirs]:
            work.finish(*barren)
        for beam, candidate in zip(chosen, going, strict=True):
            beam.tokens.append(candidate.score.token_id)
            beam.cumulative_logprob = candidate.total
            if beam.scores is not None:
                beam.scores.append(candidate.score)
            if beam.text is not None:
                beam.text.push((candidate.score.token_id,))
