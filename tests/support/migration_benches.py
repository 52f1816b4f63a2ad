"""Two schedulers between which sequences move with their blocks, step by step."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from scheduler_bench import Bench

from gpu_worker.scheduling.block_exchange import BlockExchange, BlockImport, tail_name
from gpu_worker.scheduling.freezer import Freezer
from gpu_worker.scheduling.state.sequence import FINISHED, CarriedScores, CarriedTail, Sequence
from gpu_worker.scheduling.state.step import StepItems, StepPlan
from gpu_worker.steps.runner import Runner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.pictures.picture import pack_pictures
from octavo.request.hashing import block_hashes
from octavo.request.ids import BlockHash, BlockId
from octavo.request.sampling import SamplingParams, TokenScore

SIZES = {"block_size": 4, "num_blocks": 64, "num_host_blocks": 48}


class MigrationBench(Bench):
    """A scheduler whose runner reads its blocks. It counts what its steps computed, and keeps the scores."""

    def __init__(self, *, sizes: dict | None = None, runner: Runner | None = None, **config) -> None:
        super().__init__(runner=runner or WitnessRunner(**SIZES | (sizes or {})), **config)
        self.exchange = BlockExchange(self.workload)
        self.freezer = Freezer(self.workload)
        self.scores: dict[str, list[TokenScore]] = {}
        self.totals: dict[str, float | None] = {}
        self.num_computed = 0

    def step(self) -> tuple[StepPlan, StepItems]:
        plan, result = super().step()
        self.num_computed += sum(self.lengths.values())
        for item in result.items:
            name = f"{item.seq_id}.{item.branch}"
            self.scores.setdefault(name, []).extend(item.scores)
            self.totals[name] = item.cumulative_logprob
        self.scheduler.check_state()
        return plan, result

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def send(self, target: "MigrationBench", places: SequenceOf[tuple[BlockId, BlockId]]) -> None:
        """Copies pinned blocks (mine, the target's), and keeps them there."""
        for block, place in places:
            copy_block(self, target, block, place)


def hashes_of(sequence: Sequence, block_size: int) -> list[list[BlockHash]]:
    """The hashes of the blocks that the sequence has computed, of each branch that goes on."""
    going = [branch for branch in sequence.branches if branch.state is not FINISHED]
    return [block_hashes(sequence.root, branch.tokens[:-1], block_size, shown=sequence.shown) for branch in going]


def copy_block(source: MigrationBench, target: MigrationBench, block: BlockId, place: BlockId) -> None:
    mine, theirs = source.runner.block_memory, target.runner.block_memory
    with mine.read_blocks([block]) as contents:
        for sent, received in zip(next(contents), theirs.open_block(place), strict=True):
            received[:] = sent
    theirs.keep_block(place)
    theirs.close_block(place)


def copy_tails(
    source: MigrationBench, target: MigrationBench, sequence: Sequence, held: BlockImport, indexes: dict[int, int]
) -> dict[int, CarriedTail]:
    """Sends the tails of a frozen sequence to their indexes, by branch. What is not sent is of no use."""
    pinned = source.exchange.pin_tails(sequence)
    source.scheduler.check_state()
    tails = {}
    for branch, index in indexes.items():
        name, computed = tail_name(branch), sequence.branches[branch].num_computed
        if name in pinned.blocks:
            source.send(target, [(pinned.blocks[name], held.block_of(index))])
        tails[branch] = CarriedTail(held.tails[index], computed if name in pinned.blocks else 0)
    source.exchange.unpin(pinned)
    return tails


def copy_blocks(source: MigrationBench, target: MigrationBench, held: BlockImport) -> None:
    """Sends the missing blocks of an import, and seals them."""
    pinned = source.exchange.pin([wanted.block_hash for wanted in held.missing])
    source.send(target, [(pinned.blocks[each.block_hash], held.block_of(each.index)) for each in held.missing])
    source.exchange.unpin(pinned)
    target.exchange.seal(held, [wanted.index for wanted in held.missing])


def move(
    source: MigrationBench,
    target: MigrationBench,
    name: str,
    between: Iterable[Callable[[], object]] = (),
    *,
    carry: bool = True,
    with_tails: bool = True,
) -> BlockImport:
    """Moves a sequence as two workers do: rounds while it runs, then the rest while it is frozen."""
    sequence = source.sequence(name)
    size = source.workload.info.block_size
    going = [branch.index for branch in sequence.branches if branch.state is not FINISHED]
    held = target.exchange.hold(hashes_of(sequence, size), with_tails=with_tails)
    indexes = dict(zip(going, held.tails, strict=False))
    for work in between:
        copy_blocks(source, target, held)
        work()
        target.exchange.extend(held, hashes_of(sequence, size))
    frozen = source.freezer.freeze(sequence.seq_id, sequence.epoch)
    target.exchange.extend(held, hashes_of(sequence, size))
    copy_blocks(source, target, held)
    tails = copy_tails(source, target, sequence, held, indexes)
    outputs = [source.tokens.get(f"{name}.{index}", []) for index in range(len(sequence.branches))]
    scores = [tuple(source.scores.get(f"{name}.{index}", [])) for index in range(len(sequence.branches))]
    assert [branch.num_tokens for branch in frozen.branches] == [len(output) for output in outputs]
    finished = [index for index, branch in enumerate(frozen.branches) if branch.finished]
    totals = tuple(branch.cumulative_logprob for branch in frozen.branches)
    fields = {"epoch": sequence.epoch + 1, "outputs": outputs, "finished_branches": finished}
    fields["pictures"] = pack_pictures(sequence.pictures)
    moved = target.new(name, sequence.prompt, sequence.params, **fields)
    moved.carried = CarriedScores(totals, tuple(scores), tails) if carry else None
    assert target.scheduler.admit(moved).admitted
    source.scheduler.drop(sequence)
    target.exchange.release(held)
    for bench in (source, target):
        bench.scheduler.check_state()
    return held


def sampled(**fields: object) -> SamplingParams:
    return replace(SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True), **fields)


KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": sampled(),
    "n": sampled(n=3),
    "best_of": sampled(n=2, best_of=4),
    "penalties": sampled(repetition_penalty=1.2, frequency_penalty=0.5),
    "logprobs": sampled(logprobs=2),
    "n with logprobs": sampled(n=2, best_of=3, logprobs=0),
}
