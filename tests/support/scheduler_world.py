"""A small world for the scheduler: a real one, a WitnessRunner, random clients, a journal, an oracle for outputs."""

import random

from block_traffic import BLOCK_OPERATIONS, BlockTraffic
from scheduler_bench import FAILURE
from scheduler_parts import SchedulerParts
from sequences import beam_text
from witness_model import ENDED_ALONE, Deliveries, Request, WitnessModel, random_params

from gpu_worker.drafting.drafts import LOOKUP, Drafts
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Branch, Hold, Place, Sequence
from gpu_worker.scheduling.state.step import StepItems, StepPlan
from gpu_worker.steps.runner import StepOutput
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.errors import CannotMove, InvalidArgument, NotFound, OutOfBlocks
from octavo.request.ids import SequenceId
from octavo.request.sampling import SamplingParams

ROOTS = (b"a" * 32, b"b" * 32)


class World(Deliveries):
    """Random clients of one scheduler. `seed` decides everything; every item is checked as it comes."""

    def __init__(
        self,
        seed: int,
        config: dict | None = None,
        runner: dict | None = None,
        *,
        eos: bool = True,
        moving: bool = False,  # blocks and sequences come from other workers, and leave
        ending: bool = False,  # branches end alone, and prompts wait for blocks of other workers
        guessing: bool = False,  # decodes have drafts, right ones and wrong ones
        kind: type[WitnessRunner] = WitnessRunner,
    ) -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.trial_rng = random.Random(~seed)
        self.ending_rng = random.Random(seed * 31 + 7) if ending else None
        self.seen: set[Place | Hold] = set()
        self.now = 100.0
        self.eos = eos
        sizes = {"block_size": 4, "num_blocks": 24, "num_host_blocks": 16, "vocab_size": 40, "context_tokens": 64}
        self.runner_options = {**sizes, **(runner or {}), "generate_eos": eos}
        self.guessing_rng = random.Random(seed * 17 + 3) if guessing else None
        defaults = {"max_batch_tokens": 16, "max_batch_sequences": 8, "debug": True}
        speculation = {"speculation": "lookup"} if guessing else {}
        self.config = SchedulerConfig(**{**defaults, **speculation, **(config or {})})
        super().__init__()
        self.traffic: BlockTraffic | None = None
        self.start()
        self.traffic = BlockTraffic(self, seed) if moving else None
        self.model = WitnessModel(self.runner, eos)

    def start(self) -> None:
        """A new worker: empty blocks, empty cache."""
        self.runner = self.kind(**self.runner_options)
        self.parts = SchedulerParts(self.config, self.runner.info, clock=lambda: self.now)
        self.scheduler = self.parts.scheduler
        if self.guessing_rng is not None:
            self.scheduler._planner.drafts._look_up = self.guess
        if self.traffic is not None:
            self.traffic.begin()

    def guess(self, branch: Branch, most: int) -> Drafts:
        """Drafts of a branch: the tokens to come up to a random one, and any others after it."""
        rng, request = self.guessing_rng, self.requests[branch.sequence.seq_id]
        if rng.random() < 0.3:
            return Drafts([])
        expected, _ = self.model.run(request, branch.index)
        ahead = expected[branch.num_output :][: rng.choice([0, 1, 2, 3, 8])]
        wrong = [rng.randrange(40) for _ in range(rng.choice([0, 1, 4]))]
        return Drafts([*ahead, *wrong][:most], LOOKUP)

    # Clients

    def submit(self, params: SamplingParams | None = None, prompt: list[int] | None = None) -> Request:
        rng = self.rng
        params = params or random_params(rng)
        if prompt is None:
            longest = rng.choice([3, 12, 24, 38])
            prompt = [rng.choice([1, 2]) for _ in range(rng.randint(1, longest))]
        request = Request(
            SequenceId(f"s{len(self.requests)}"),
            prompt,
            params,
            rng.choice(ROOTS),
            rng.choice([1, 3, 3, 4]),
            rng.random() < 0.05,
        )
        request.outputs = [[] for _ in range(params.num_branches)]
        self.requests[request.seq_id] = request
        self.admit(request)
        return request

    def admit(self, request: Request) -> None:
        deadline_in_ms = self.rng.randint(1, 3000) if self.rng.random() < 0.05 else 0
        sequence = request.sequence(
            self.now,
            suspect=request.suspect,
            deadline_in_ms=deadline_in_ms,
            beam_text=beam_text(request.params, self.runner.info.eos_token_ids),
        )
        if self.ending_rng and not request.suspect and self.ending_rng.random() < 0.1:
            sequence.holds.add(Hold.AWAITS_PREFIX)
        answer = self.scheduler.admit(sequence)
        self.admitted[request.seq_id] = sequence
        if answer.admitted:
            self.open[request.seq_id] = request
        self.counts[answer.outcome.value] += 1

    def replay(self, request: Request) -> None:
        """Another owner takes over from the journal."""
        request.epoch += 1
        request.replayed = True
        self.counts["replay"] += 1
        self.admit(request)

    def crash(self) -> None:
        """The worker dies with everything in it; all open requests are replayed on a new one."""
        self.start()
        self.counts["crash"] += 1
        for request in list(self.open.values()):
            self.replay(request)

    # Time

    def step(self, fail: bool = False) -> StepItems:
        suspect = self.advance_trial()
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.config.max_batch_tokens
        assert plan.num_tokens == sum(chunk.length for chunk in plan.chunks)
        assert sum(len(chunk.samples) for chunk in plan.chunks) <= self.config.max_batch_sequences
        self.counts["drafts"] += plan.num_drafts
        running = {chunk.branch.sequence for chunk in plan.chunks}
        assert not any(sequence.place is Place.FROZEN for sequence in running)
        assert running <= {suspect} if suspect else not any(Hold.CRASHED in sequence.holds for sequence in running)
        if not plan.input.touches_other_blocks:
            self.lend()
        self.end_something()
        if fail:
            self.output(plan) if self.rng.random() < 0.5 else None
            result = self.scheduler.abort_step(plan, FAILURE)
            self.counts["failed step"] += 1
        else:
            output = self.output(plan)
            result = self.scheduler.commit(plan, output)
        assert not self.runner.mismatches, self.runner.first_mismatch
        self.scheduler.check_state()
        for sequence in self.parts.workload.sequences.values():
            self.seen |= {sequence.place, *sequence.holds}
        for item in result.items:
            self.deliver(item)
        self.now += self.rng.choice([0.001, 0.01, 0.3])
        self.counts["step"] += 1
        return result

    def lend(self) -> None:
        """Lets blocks be pinned, held and given back while the step is in flight, as the engine does it."""
        if self.traffic is not None and self.traffic.rng.random() < 0.3:
            self.traffic.operate(BLOCK_OPERATIONS)
            self.counts["during a step"] += 1

    def copied(self, plan: StepPlan) -> None:
        """The runner has made the copies of the step: from then on it is as one without copies."""
        self.scheduler.end_copies(plan)
        self.counts["after copies"] += self.traffic is not None and plan.input.touches_other_blocks
        self.lend()

    def end_something(self) -> None:
        """Ends a sequence, a branch alone, or the wait for blocks of another worker: between steps or during one."""
        if self.ending_rng is None or not self.open or self.ending_rng.random() < 0.9:
            return
        request = self.ending_rng.choice(list(self.open.values()))
        sequence = self.admitted[request.seq_id]
        how = self.ending_rng.choice(["wait", "branch", "branch", "cancel", "drop"])
        branch = self.ending_rng.randrange(len(request.outputs))
        if how == "wait":
            self.scheduler.end_wait(sequence)
        elif how == "cancel":
            self.scheduler.cancel(sequence)
        elif how == "drop":
            self.scheduler.drop(sequence)
            self.replay(request)
        elif self.scheduler.end_branch(sequence, branch):
            self.counts["ended alone"] += 1
            self.finish(request, branch, ENDED_ALONE)

    def advance_trial(self) -> Sequence | None:
        """The suspect that has the steps to itself now: one after the other, each until it has some tokens or ends."""
        suspect, scheduler, rng = self.parts.workload.reserved_for, self.scheduler, self.trial_rng
        if suspect is None:
            crashed = [suspect for suspect in self.parts.workload.suspects if Hold.CRASHED in suspect.holds]
            suspect = rng.choice(crashed) if crashed and rng.random() < 0.3 else None
            if suspect is not None:
                assert scheduler.reserve_steps(suspect)
                self.counts["trial"] += 1
        elif self.parts.workload.on_trial is None:
            if rng.random() < 0.5:
                scheduler.begin_trial(suspect)
        else:
            num_new = sum(branch.num_output - branch.num_journalled_at_start for branch in suspect.branches)
            if num_new >= 6 or not scheduler.is_here(suspect):
                scheduler.end_trial(suspect)
                suspect = None
        return suspect

    def output(self, plan) -> StepOutput:
        output = self.runner.run(plan.input, lambda: self.copied(plan))
        self.lend()
        return output

    # Chaos

    def operate(self) -> None:
        """One random operation."""
        rng = self.rng
        if self.traffic is not None and self.traffic.rng.random() < 0.3:
            self.traffic.operate()
        self.end_something()
        scheduler = self.scheduler
        chance = rng.random()
        request = rng.choice(list(self.open.values())) if self.open else None
        if request is None or (chance < 0.10 and len(self.open) < 12):
            self.submit()
        elif chance < 0.115:
            cancelled = scheduler.cancel(self.admitted[request.seq_id])
            assert cancelled or scheduler.has_work  # it may have been cancelled already
        elif chance < 0.125:
            scheduler.drop(self.admitted[request.seq_id])
            self.replay(request)
        elif chance < 0.13:
            self.crash()
        elif chance < 0.15:
            self.move(request)
        else:
            self.step(fail=chance > 0.995)

    def move(self, request: Request) -> None:
        operation = self.rng.choice(["out", "in", "drop"])
        try:
            self.counts[operation] += self.scheduler.swap(request.seq_id, request.epoch, operation) > 0
        except (OutOfBlocks, NotFound, InvalidArgument, CannotMove) as error:
            # NotFound: cancelled, its end comes with the next step. InvalidArgument: a suspect, which is not held.
            # CannotMove: frozen.
            self.counts[f"{operation} {error.reason}"] += 1
        if self.counts["step"] % 2 and (plan := self.scheduler.plan_moves()) is not None:  # else the next step copies
            failed = self.counts["step"] % 16 == 1
            if not failed:
                self.runner.run(plan.input)
            self.scheduler.end_moves(plan, failed=failed)
            self.counts["moves failed" if failed else "moves"] += 1
        self.scheduler.check_state()

    def drain(self, limit: int = 20000) -> None:
        """Runs until nothing is left, and nothing is."""
        self.scheduler.end_holds()
        for sequence in self.parts.workload.sequences.values():
            self.scheduler.end_wait(sequence)
        if self.traffic is not None:
            self.traffic.end()
            self.traffic = None
        for _ in range(limit):
            if not self.open:
                break
            self.step()
        assert not self.open, f"still open after {limit} steps: {self.parts.load()}"
        while self.scheduler.has_work or self.parts.workload.reserved_for:
            self.step()
        load = self.parts.load()
        assert load.num_sequences == load.num_used_blocks == 0
        assert load.num_free_host_blocks == self.runner.info.num_host_blocks
        assert not self.parts.workload.suspects
