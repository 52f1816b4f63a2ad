"""Offline generation: exact outputs of a FakeRunner, whatever the prompts' number, order, company and parameters."""

import io
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_beams import best_outputs

from gpu_worker import LLM, SamplingParams
from gpu_worker.scheduling.state.load import Load
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.request.errors import InvalidArgument, RunnerFailed
from octavo.request.sampling import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make(seed=0, generate_eos=False, options=None, **runner):
    runner = FakeRunner(**{"vocab_size": 128, "generate_eos": generate_eos, **runner})
    return LLM(seed=seed, runner=runner, **(options or {}))


def idle(llm):
    load = Load.of(llm.engine.workload)
    llm.engine.scheduler.check_state()
    return load.num_sequences == load.num_used_blocks == load.num_waiting == 0 and not llm.engine.scheduler.has_work


def text_of(token_ids):
    return bytes(token_ids).decode(errors="replace")


@pytest.fixture(scope="module")
def llm():
    return make()


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 99), min_size=1, max_size=40),
            st.integers(1, 12),
            st.integers(1, 3),
            st.sampled_from([0.0, 1.0]),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_each_prompt_gets_its_own_answer_in_order(requests):
    llm = make(num_blocks=24, block_size=4, options={"max_batch_tokens": 16, "max_batch_sequences": 4})
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n if temperature else 1, seed=seed)
        for _, max_tokens, n, temperature, seed in requests
    ]
    answers = llm.generate([prompt for prompt, *_ in requests], params, use_tqdm=False)
    for (prompt, max_tokens, *_), own, answer in zip(requests, params, answers, strict=True):
        assert [output.index for output in answer.outputs] == list(range(own.n))
        for branch, output in enumerate(answer.outputs):
            expected = fake_oracle(prompt, max_tokens, info=llm.info, params=own.to_sampling(), branch=branch)
            assert list(output.token_ids) == expected
            assert output.text == text_of(expected)
            assert output.finish_reason == "length"
    assert idle(llm)


def test_more_prompts_than_the_queue_takes():
    llm = make(vocab_size=50)
    bound = llm.engine.workload.config.max_waiting
    longest = 0
    step = llm.engine.loop.step

    def watched():
        nonlocal longest
        longest = max(longest, len(llm.engine.workload.waiting))
        return step()

    llm.engine.loop.step = watched
    prompts = [[i % 50, i // 50] for i in range(bound + 300)]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert longest == bound
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.outputs[0].token_ids) == fake_oracle(prompt, 2, info=llm.info)
    assert idle(llm)


# Ends


def test_a_stop_string_ends_one_answer_where_it_begins():
    llm = make()
    expected = fake_oracle(list(b"q"), 30, info=llm.info)
    stop = text_of(expected[10:12])
    end = text_of(expected).index(stop)
    params = replace(GREEDY, max_tokens=30, stop=("never there", stop))
    plain, cut = llm.generate(["q", "q"], [replace(GREEDY, max_tokens=30), params], use_tqdm=False)
    (output,) = cut.outputs
    assert output.text == text_of(expected)[:end]
    assert list(output.token_ids) == expected[: end + 2]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert list(plain.outputs[0].token_ids) == expected
    included = llm.generate("q", replace(params, include_stop=True), use_tqdm=False)[0].outputs[0]
    assert included.text == output.text + stop
    assert idle(llm)


def test_stop_tokens_say_which_and_the_end_of_sequence_does_not():
    llm = make(generate_eos=True, vocab_size=10)
    expected = fake_oracle([1, 2, 3], 200, info=llm.info, generate_eos=True)
    end = expected.index(0)
    output = llm.generate([1, 2, 3], replace(GREEDY, max_tokens=200), use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == expected[: end + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == text_of(expected[:end])  # what ends it has no text
    stop = expected[0]
    output = llm.generate([1, 2, 3], replace(GREEDY, stop_token_ids=(stop,)), use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.stop_reason) == ([stop], stop)


# Ranking and scores


@pytest.mark.parametrize(("first", "stop"), [(25, ("\n", "%", "Q", "c")), (35, ("e",)), (66, ("a", "q"))])
def test_a_beam_that_is_better_for_its_length_comes_before_one_of_a_higher_sum(llm, first, stop):
    params = SamplingParams(n=2, beam_width=3, max_tokens=16, stop=stop)
    best, next_best = best_outputs(llm.info, [first, 5], params)
    assert best.total < next_best.total
    outputs = llm.generate([[first, 5]], params, use_tqdm=False)[0].outputs
    assert [tuple(output.token_ids) for output in outputs] == [best.token_ids, next_best.token_ids]
    assert [output.index for output in outputs] == [0, 1]


@pytest.mark.parametrize("stop", [("a", "q"), ("ab", "5", "~"), ("\n", "%", "Q", "c")])
@pytest.mark.parametrize("changes", [{}, {"include_stop": True, "min_tokens": 4}, {"length_penalty": 0.0}])
def test_beams_end_at_their_stop_strings_and_are_scored_there(llm, stop, changes):
    ends = set()
    for number in range(6):
        params = SamplingParams(n=2, beam_width=3, max_tokens=16, stop=stop, **changes)
        (answer,) = llm.generate([[number, 5]], params, use_tqdm=False)
        expected = best_outputs(llm.info, [number, 5], params)
        got = [(tuple(output.token_ids), output.text, output.finish_reason) for output in answer.outputs]
        assert got == [(best.token_ids, best.text, best.finish.name.lower()) for best in expected]
        assert [o.cumulative_logprob for o in answer.outputs] == pytest.approx([best.total for best in expected])
        ends |= {best.finish for best in expected}
    assert FinishReason.STOP in ends
    assert idle(llm)


# Bad input


def test_nothing_runs_if_one_prompt_is_bad(llm):
    steps = llm.engine.loop.times.num_steps
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: is empty"):
        llm.generate(["ok", ""], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidArgument, match=r"^messages\[0\]: .*template"):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert idle(llm)
    assert llm.engine.loop.times.num_steps == steps


# What goes wrong


class Breaking(FakeRunner):
    """Does something else instead of its fifth step."""

    def __init__(self, act):
        super().__init__(vocab_size=100)
        self.act = act
        self.num_runs = 0

    def run(self, step, *further):
        self.num_runs += 1
        if self.num_runs == 5:
            self.act()
        return super().run(step, *further)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "act", [interrupt, lambda: signal.raise_signal(signal.SIGINT)], ids=["within a step", "as a signal"]
)
def test_an_interrupt_leaves_nothing_behind(act):
    llm = LLM(runner=Breaking(act))
    before = signal.getsignal(signal.SIGINT)
    prompts = [[i] * 20 for i in range(100)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(max_tokens=50, n=2, seed=1), use_tqdm=False)
    assert llm.runner.num_runs == 5
    assert signal.getsignal(signal.SIGINT) is before
    assert idle(llm)
    (answer,) = llm.generate(prompts[3], GREEDY, use_tqdm=False)
    assert list(answer.outputs[0].token_ids) == fake_oracle(prompts[3], 8, info=llm.info)


def test_a_prompt_the_model_fails_on_says_why_and_the_others_have_answers(caplog):
    class Picky(FakeRunner):
        def run(self, step, *further):
            output = super().run(step, *further)
            if any(seat.tokens[0] == 13 for seat in self.seats.of_chunks(step)):
                raise RuntimeError("thirteen")
            return output

    llm = LLM(runner=Picky(vocab_size=100))
    good, bad = llm.generate([[12], [13]], GREEDY, use_tqdm=False)
    assert list(good.outputs[0].token_ids) == fake_oracle([12], 8, info=llm.info)
    assert (bad.outputs[0].finish_reason, bad.failure.reason) == ("error", RunnerFailed.reason)
    assert "thirteen" in bad.failure.message
    assert idle(llm)


def test_calls_from_threads_wait_for_each_other(llm):
    answers = {}

    def call(i):
        answers[i] = llm.generate([[i, 1], [i, 2]], GREEDY, use_tqdm=False)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        for j, answer in enumerate(answers[i], 1):
            assert list(answer.outputs[0].token_ids) == fake_oracle([i, j], 8, info=llm.info)


# The bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("shown", "options", "text"),
    [(Terminal(), {}, "3/3"), (Terminal(), {"use_tqdm": False}, ""), (io.StringIO(), {}, "")],
)
def test_a_bar_counts_prompts_in_a_terminal_unless_left_out(llm, shown, options, text):
    with redirect_stderr(shown):
        llm.generate(["a", "b", "c"], GREEDY, **options)
    assert text in shown.getvalue() and bool(shown.getvalue()) == bool(text)


# The package


def test_importing_the_package_is_cheap(root):
    code = (
        "import sys, gpu_worker; before = set(sys.modules)\n"
        "from gpu_worker import LLM, SamplingParams\n"
        "print([m for m in ('gpu_worker.offline.llm', 'tokenizers') if m in before], "
        "[m for m in ('torch', 'grpc', 'redis', 'router') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[] []"
