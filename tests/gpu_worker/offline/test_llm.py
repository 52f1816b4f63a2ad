"""Offline generation: exact outputs of a FakeRunner, whatever the prompts' number, order, company and parameters."""

import io
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_beams import best_outputs

from gpu_worker import LLM, SamplingParams
from gpu_worker.scheduling.state.load import Load
from gpu_worker.testing.fake_runner import FakeRunner, fake_oracle
from octavo.cli import up
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


prompts = st.lists(st.integers(0, 99), min_size=1, max_size=40)
asked = st.tuples(prompts, st.integers(1, 12), st.integers(1, 3), st.sampled_from([0.0, 1.0]), st.integers(0, 3))


@settings(max_examples=25)
@given(st.lists(asked, max_size=12))
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
    llm, lengths = make(vocab_size=50), []
    llm.engine._config = replace(llm.engine._config, max_waiting=40)
    llm.engine.start_anew()
    step = llm.engine.loop.step
    llm.engine.loop.step = lambda: (lengths.append(len(llm.engine.workload.waiting)), step())[1]
    prompts = [[i % 50, i // 50] for i in range(140)]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert max(lengths) == 40
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.outputs[0].token_ids) == fake_oracle(prompt, 2, info=llm.info)
    assert idle(llm)


def test_what_ends_an_answer_is_told():
    llm, params = make(), replace(GREEDY, max_tokens=30)
    tokens = fake_oracle(list(b"q"), 30, info=llm.info)
    stop, end = text_of(tokens[10:12]), text_of(tokens).index(text_of(tokens[10:12]))
    stopped = replace(params, stop=("never there", stop))
    asked = [params, stopped, replace(stopped, include_stop=True), replace(params, stop_token_ids=(tokens[0],))]
    outputs = [answer.outputs[0] for answer in llm.generate(["q"] * 4, asked, use_tqdm=False)]
    assert [list(output.token_ids) for output in outputs] == [tokens, *[tokens[: end + 2]] * 2, tokens[:1]]
    assert [output.text for output in outputs[:3]] == [
        text_of(tokens),
        text_of(tokens)[:end],
        text_of(tokens[: end + 2]),
    ]
    told = [(output.finish_reason, output.stop_reason) for output in outputs]
    assert told == [("length", None), ("stop", stop), ("stop", stop), ("stop", tokens[0])]
    assert idle(llm)
    llm = make(generate_eos=True, vocab_size=10)
    tokens = fake_oracle([1, 2, 3], 200, info=llm.info, generate_eos=True)
    end = tokens.index(0)
    output = llm.generate([1, 2, 3], replace(GREEDY, max_tokens=200), use_tqdm=False)[0].outputs[0]
    assert (list(output.token_ids), output.finish_reason, output.stop_reason) == (tokens[: end + 1], "stop", None)
    assert output.text == text_of(tokens[:end])  # what ends it has no text


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


def test_nothing_runs_if_one_prompt_is_bad(llm):
    steps = llm.engine.loop.times.num_steps
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: is empty"):
        llm.generate(["ok", ""], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidArgument, match=r"^messages\[0\]: .*template"):
        llm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert idle(llm)
    assert llm.engine.loop.times.num_steps == steps


class Breaking(FakeRunner):
    """Does something else instead of its fifth step, and fails on a prompt that begins with 13."""

    act = None
    num_runs = 0

    def run(self, step, *further):
        self.num_runs += 1
        if self.num_runs == 5 and self.act:
            self.act()
        output = super().run(step, *further)
        if any(seat.tokens[0] == 13 for seat in self.seats.of_chunks(step)):
            raise RuntimeError("thirteen")
        return output


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("act", [interrupt, lambda: signal.raise_signal(signal.SIGINT)], ids=["in a step", "signal"])
def test_an_interrupt_leaves_nothing_behind(act):
    llm, before = LLM(runner=Breaking(vocab_size=100)), signal.getsignal(signal.SIGINT)
    llm.runner.act, prompts = act, [[i] * 20 for i in range(100)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(max_tokens=50, n=2, seed=1), use_tqdm=False)
    assert llm.runner.num_runs == 5 and signal.getsignal(signal.SIGINT) is before
    assert idle(llm)
    (answer,) = llm.generate(prompts[3], GREEDY, use_tqdm=False)
    assert list(answer.outputs[0].token_ids) == fake_oracle(prompts[3], 8, info=llm.info)


def test_a_prompt_the_model_fails_on_says_why_and_the_others_have_answers():
    llm = LLM(runner=Breaking(vocab_size=100))
    good, bad = llm.generate([[12], [13]], GREEDY, use_tqdm=False)
    assert list(good.outputs[0].token_ids) == fake_oracle([12], 8, info=llm.info)
    assert (bad.outputs[0].finish_reason, bad.failure.reason) == ("error", RunnerFailed.reason)
    assert "thirteen" in bad.failure.message
    assert idle(llm)


def test_calls_from_threads_wait_for_each_other(llm):
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: llm.generate([[i, 1], [i, 2]], GREEDY, use_tqdm=False), range(4)))
    for i, answers in enumerate(found):
        for j, answer in enumerate(answers, 1):
            assert list(answer.outputs[0].token_ids) == fake_oracle([i, j], 8, info=llm.info)


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


def test_importing_the_package_is_cheap(root):
    code = (
        "import sys, gpu_worker; before = set(sys.modules)\n"
        "from gpu_worker import LLM, SamplingParams\n"
        "print([m for m in ('gpu_worker.offline.llm', 'tokenizers') if m in before], "
        "[m for m in ('torch', 'grpc', 'redis', 'router') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[] []"


def test_the_first_example_reads_well(demo_model, root) -> None:
    readme = (root / "README.md").read_text()
    found = re.search(r"octavo generate '(.+)' --max-tokens (\d+) --temperature 0\n", readme)
    assert found and (found[1], int(found[2])) == (up.SAMPLE_PROMPT, up.SAMPLE_TOKENS)
    with LLM(str(demo_model), threads=1, max_model_len=64) as llm:
        (output,) = llm.generate(found[1], SamplingParams(max_tokens=int(found[2]), temperature=0))
    assert re.fullmatch(r" [a-z][A-Za-z ,]+\.", output.outputs[0].text)
