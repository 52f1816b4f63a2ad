"""Random pins, imports, freezes and moves in the world of random clients of tests/support/scheduler_world.py."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_worker.scheduling.block_exchange import BlockExchange, BlockImport, PinnedBlocks
from gpu_worker.scheduling.freezer import Freezer, FrozenSequence
from gpu_worker.scheduling.standby_blocks import SentBlock, StandbyBlocks
from gpu_worker.scheduling.state.sequence import CarriedScores, CarriedTail, Place
from gpu_worker.testing.witness_runner import LAYERS, salt_of
from octavo.request import hashing
from octavo.request.errors import CannotMove, NotFound, OutOfBlocks
from octavo.request.hashing import block_hashes
from octavo.request.ids import BlockHash

BLOCK_OPERATIONS = [
    "pin",
    "unpin",
    "hold",
    "extend",
    "arrive",
    "release",
    "keep tail",
]  # also while a step is in flight
OPERATIONS = [*BLOCK_OPERATIONS, "freeze", "thaw", "move", "roll"]


@dataclass
class Known:
    """What the blocks of some branches hold, by hash: the root, their tokens, and the position of the first."""

    hashes: list[list[BlockHash]] = field(default_factory=list)
    contents: dict[BlockHash, tuple[bytes, list[int], int]] = field(default_factory=dict)


class BlockTraffic:
    """Another worker, as far as the scheduler of the world sees of it: it has every block, and takes every block."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed * 7919 + 1)
        self.begin()

    def begin(self) -> None:
        """The world has a new scheduler, in which nothing is pinned."""
        self.exchange = BlockExchange(self.world.parts.workload)
        self.freezer = Freezer(self.world.parts.workload)
        self.standby, self.tail = StandbyBlocks(self.world.parts.workload), None
        self.pins: list[tuple[PinnedBlocks, Known]] = []
        self.imports: list[tuple[BlockImport, Known]] = []

    def known(self, request: Any) -> Known:
        """The blocks that the owner of a sequence has computed, of the branches that go on."""
        size, known = self.world.runner.info.block_size, Known()
        for branch, output in enumerate(request.outputs):
            if branch in request.finishes:
                continue
            tokens = (request.prompt + output)[:-1]
            known.hashes.append(block_hashes(request.root, tokens, size))
            for index, block_hash in enumerate(known.hashes[-1]):
                known.contents[block_hash] = (request.root, tokens[index * size : (index + 1) * size], index * size)
        return known

    def operate(self, operations: list[str] = OPERATIONS) -> None:
        """One random operation."""
        rng, world = self.rng, self.world
        requests = list(world.requests.values()) or [None]
        request, going = rng.choice(requests), list(world.open.values())
        operation = rng.choice(operations)
        if operation == "pin" and request is not None:
            known = self.known(request)
            self.pins.append((self.exchange.pin(known.contents), known))
        elif operation == "unpin" and self.pins:
            self.unpin(self.pins.pop(rng.randrange(len(self.pins))))
        elif operation == "hold" and request is not None and len(self.imports) < 2:
            self.hold(self.known(request))
        elif operation == "extend" and request is not None and self.imports:
            self.extend(*rng.choice(self.imports), self.known(request))
        elif operation == "arrive" and self.imports:
            self.arrive(*rng.choice(self.imports))
        elif operation == "release" and self.imports:
            self.exchange.release(self.imports.pop(rng.randrange(len(self.imports)))[0])
        elif operation == "keep tail" and going:
            self.keep_tail(rng.choice(going))
        elif operation == "freeze" and going:
            self.freeze(rng.choice(going))
        elif operation == "thaw" and going:
            self.thaw(rng.choice(going))
        elif operation == "move" and going:
            self.move(rng.choice(going))
        elif operation == "roll" and rng.random() < 0.3:
            self.roll()
        world.scheduler.check_state()

    def end(self) -> None:
        """Gives everything back."""
        for pinned in self.pins:
            self.unpin(pinned)
        for held, _ in self.imports:
            self.exchange.release(held)
        self.pins, self.imports = [], []
        for sequence in list(self.world.parts.workload.frozen):
            self.freezer.thaw(sequence.seq_id, sequence.epoch)

    # Blocks

    def unpin(self, pin: tuple[PinnedBlocks, Known]) -> None:
        pinned, known = pin
        for block_hash, block in pinned.blocks.items():
            expected = self.content(*known.contents[block_hash])
            assert (self.world.runner._arena[block] == expected).all(), "a pinned block was overwritten"
        self.exchange.unpin(pinned)

    def hold(self, known: Known) -> BlockImport | None:
        try:
            held = self.exchange.hold(known.hashes, with_tails=self.rng.random() < 0.7)
        except (OutOfBlocks, CannotMove) as error:
            self.world.counts[f"hold {error.reason}"] += 1
            return None
        self.imports.append((held, known))
        return held

    def extend(self, held: BlockImport, known: Known, more: Known) -> None:
        before = held.num_blocks, len(held.wanted), self.world.parts.load().num_used_blocks
        try:
            self.exchange.extend(held, more.hashes)
        except OutOfBlocks:
            assert before == (held.num_blocks, len(held.wanted), self.world.parts.load().num_used_blocks)
        else:
            known.contents.update(more.contents)

    def arrive(self, held: BlockImport, known: Known) -> None:
        """Some of the missing blocks arrive, and some of these are sealed at once."""
        for wanted in self.rng.sample(held.missing, self.rng.randint(0, len(held.missing))):
            self.world.runner._arena[held.block_of(wanted.index)] = self.content(*known.contents[wanted.block_hash])
            self.exchange.seal(held, [wanted.index])
            self.world.counts["arrived"] += 1

    def keep_tail(self, request: Any) -> None:
        """A tail comes of a sequence that runs here, or runs here again later: of where it is now, or was before."""
        size, known = self.world.runner.info.block_size, self.known(request)
        if not known.hashes or not self.world.parts.workload.tables.cache.enabled:
            return
        branch = self.rng.choice([each for each in range(len(request.outputs)) if each not in request.finishes])
        tokens = (request.prompt + request.outputs[branch])[:-1]
        num_full = min(len(tokens) // size, self.rng.choice([len(tokens) // size, self.rng.randint(0, 3)]))
        part = tokens[num_full * size :][: self.rng.randint(1, size - 1)] if size > 1 else []
        if not part:
            return
        hashes = block_hashes(request.root, tokens[: num_full * size], size)
        name = hashing.block_hash(request.root, hashes[-1] if hashes else b"", part)
        content, arena = self.content(request.root, part, num_full * size), self.world.runner._arena

        def write(block: int, _: bytes) -> None:
            arena[block, : len(part)] = content

        is_kept = self.standby.put_tail(SentBlock(name, b""), [] if self.tail is None else [self.tail], write)
        self.tail = name if is_kept else None
        self.world.counts["kept tails"] += is_kept

    def content(self, root: bytes, tokens: list[int], start: int) -> Any:
        salt = salt_of(root)
        slots = [
            [[token | position << 32, salt ^ layer] for layer in LAYERS] for position, token in enumerate(tokens, start)
        ]
        return np.array(slots, dtype=np.uint64)

    # Sequences

    def freeze(self, request: Any) -> FrozenSequence | None:
        try:
            frozen = self.freezer.freeze(request.seq_id, request.epoch)
        except (CannotMove, NotFound) as error:  # NotFound: it was cancelled, and its end comes with the next step
            self.world.counts[f"freeze {getattr(error, 'cause', error.reason)}"] += 1
            return None
        going = [branch for branch in range(len(request.outputs)) if branch not in request.finishes]
        assert [frozen.branches[b].num_tokens for b in going] == [len(request.outputs[b]) for b in going]
        return frozen

    def thaw(self, request: Any) -> None:
        self.freezer.thaw(request.seq_id, request.epoch)

    def move(self, request: Any) -> None:
        """The sequence comes back to this scheduler, at a new epoch; perhaps others have taken its blocks meanwhile."""
        frozen = self.freeze(request)
        if frozen is None:
            return
        if self.rng.random() < 0.3:
            self.world.step()  # frozen
        known, sequence = self.known(request), self.world.admitted[request.seq_id]
        if not self.world.scheduler.is_here(sequence) or len(known.hashes) == 0:
            return
        if self.rng.random() < 0.5:
            self.world.scheduler.drop(sequence)
        held = self.hold(known)
        if held is not None and self.rng.random() < 0.3:
            self.world.step()
        if self.world.open.get(request.seq_id) is request:
            self.take_over(request, frozen, held, known)

    def roll(self) -> None:
        """A new worker takes over all sequences of this one: those that can move come with their blocks."""
        world = self.world
        frozen = {request.seq_id: self.freeze(request) for request in world.open.values()}
        world.start()
        for request in list(world.open.values()):
            stop = frozen[request.seq_id]
            if stop is None:
                world.replay(request)
            else:
                known = self.known(request)
                self.take_over(request, stop, self.hold(known), known)

    def tails(self, request: Any, held: BlockImport | None) -> dict[int, CarriedTail]:
        """Some of the tails have arrived. The others are of no use."""
        size = self.world.runner.info.block_size
        going = [branch for branch in range(len(request.outputs)) if branch not in request.finishes]
        if held is None or len(held.tails) != len(going):
            return {}
        tails = {}
        for branch, (index, reservation) in zip(going, held.tails.items(), strict=True):
            tokens = (request.prompt + request.outputs[branch])[:-1]
            num_in_tail = len(tokens) % size
            sent = bool(num_in_tail and reservation.blocks) and self.rng.random() < 0.9
            if sent:
                start = len(tokens) - num_in_tail
                content = self.content(request.root, tokens[start:], start)
                self.world.runner._arena[held.block_of(index), :num_in_tail] = content
                self.world.counts["tails"] += 1
            tails[branch] = CarriedTail(reservation, len(tokens) if sent else 0)
        return tails

    def take_over(self, request: Any, frozen: FrozenSequence, held: BlockImport | None, known: Known) -> None:
        """Admits a frozen sequence at its next epoch, with the blocks that have arrived."""
        world = self.world
        while held is not None and held.missing and self.rng.random() < 0.95:
            self.arrive(held, known)
        request.epoch += 1
        sequence = request.sequence(world.now)
        totals = tuple(branch.cumulative_logprob for branch in frozen.branches)
        scores = tuple(tuple(request.scores[b]) for b in range(len(request.outputs)))
        sequence.carried = CarriedScores(totals, scores, self.tails(request, held))
        answer = world.scheduler.admit(sequence)
        world.admitted[request.seq_id] = sequence
        assert answer.admitted, answer
        world.counts["moved, waits" if sequence.place is Place.WAITING else "moved"] += 1
        if held is not None and self.rng.random() < 0.8:
            self.imports = [entry for entry in self.imports if entry[0] is not held]
            self.exchange.release(held)
