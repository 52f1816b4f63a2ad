"""A branch that is ended alone gives its blocks back, says nothing more, and changes no token of its siblings."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.sampling import SamplingParams


class Small:
    """A scheduler that is short of blocks, and what came of it."""

    def __init__(self, num_blocks, **config):
        sizes = {"num_blocks": num_blocks, "num_host_blocks": 8, "context_tokens": 64}
        self.runner = FakeRunner(vocab_size=50, block_size=4, **sizes)
        self.now = 0.0
        config = SchedulerConfig(**{"max_batch_tokens": 16, "max_batch_sequences": 8, "debug": True, **config})
        self.parts = SchedulerParts(config, self.runner.info, clock=lambda: self.now)
        self.scheduler = self.parts.scheduler
        self.outputs = {}
        self.sequences = {}
        self.ended = set()

    def admit(self, name, prompt, params):
        self.sequences[name] = new_sequence(name, prompt, params)
        assert self.scheduler.admit(self.sequences[name]).admitted
        for branch in range(params.num_branches):
            self.outputs[name, branch] = []

    def step(self, between=lambda: None):
        plan = self.scheduler.plan()
        between()
        result = self.scheduler.commit(plan, self.runner.run(plan))
        for item in result.items:
            key = item.seq_id, item.branch
            assert key not in self.ended
            assert item.first_index == len(self.outputs[key])
            self.outputs[key] += item.token_ids
        self.now += 1.0

    def end(self, name, branch):
        if self.scheduler.end_branch(self.sequences[name], branch):
            self.ended.add((name, branch))


@given(st.data())
def test_siblings_go_on_as_if_nothing_had_happened(data):
    small = Small(data.draw(st.integers(16, 40)), preemption=data.draw(st.sampled_from(["swap", "recompute", "auto"])))
    requests = {}
    for name in ("a", "b", "c"):
        n = data.draw(st.integers(1, 3))
        params = SamplingParams(n=n, best_of=n, max_tokens=data.draw(st.integers(1, 14)), seed=len(requests))
        requests[name] = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=14)), params
        small.admit(name, *requests[name])
    ends = data.draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 2), st.booleans())))
    number = 0
    while small.scheduler.has_work:
        now = [(name, branch, inside) for at, name, branch, inside in ends if at == number]

        def inside(now=now):
            for name, branch, within in now:
                if within:
                    small.end(name, branch)

        for name, branch, within in now:
            if not within:
                small.end(name, branch)
        small.step(inside)
        number += 1
        assert number < 500
    for (name, branch), output in small.outputs.items():
        prompt, params = requests[name]
        expected = fake_oracle(prompt, params.max_tokens, info=small.runner.info, params=params, branch=branch)
        assert output == (expected[: len(output)] if (name, branch) in small.ended else expected)
    load = small.parts.load()
    assert load.num_sequences == load.num_used_blocks == load.num_waiting == 0


def test_what_is_not_there_cannot_be_ended():
    small = Small(32)
    params = SamplingParams(n=2, beam_width=2, max_tokens=4)
    small.admit("beams", [1, 2], params)
    small.step()
    small.step()
    other = new_sequence("other", [1], params)
    for sequence, branch in [(other, 0), (small.sequences["beams"], 0), (small.sequences["beams"], 7)]:
        assert not small.scheduler.end_branch(sequence, branch)


def test_the_last_branch_takes_the_sequence_with_it():
    small = Small(32)
    small.admit("one", [1, 2, 3], SamplingParams(n=2, max_tokens=30, seed=1))
    small.step()
    for branch in (1, 0):
        assert small.scheduler.end_branch(small.sequences["one"], branch)
        assert not small.scheduler.end_branch(small.sequences["one"], branch)
    assert not small.parts.workload.sequences
    assert not small.scheduler.has_work
    assert small.parts.load().num_used_blocks == 0


def test_a_sibling_keeps_the_blocks_that_the_next_step_brings_back():
    """Both branches share blocks, and one ends between the swap in and the step that makes its copies."""
    runner = WitnessRunner(vocab_size=50, block_size=4, num_blocks=32, num_host_blocks=16, context_tokens=64)
    config = SchedulerConfig(max_batch_tokens=16, max_batch_sequences=8, prefix_caching=False, debug=True)
    scheduler = SchedulerParts(config, runner.info).scheduler
    sequence = new_sequence("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(n=2, best_of=2, max_tokens=30, seed=1))
    scheduler.admit(sequence)

    def step():
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))

    for _ in range(4):
        step()
    assert scheduler.swap("a", sequence.epoch, "out")
    step()
    assert scheduler.swap("a", sequence.epoch, "in")
    assert scheduler.end_branch(sequence, 1)
    step()
    step()
    assert not runner.mismatches, runner.first_mismatch
