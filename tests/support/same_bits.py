"""Sequences of a real model that are continued after a fault, and the same ones undisturbed: equal bits or not?

    PYTHONPATH=tests/support python -m same_bits --sequences 200

Whatever is continued goes on from the tokens of the undisturbed run, as from a journal; what is compared is each token
from there on and, where the request asks for log probabilities, the bits of all of them. Engines run in this process,
one after another: of two workers each has a runner, with blocks of its own.
"""

import argparse
import random
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from migration_benches import MigrationBench, move

from gpu_worker.ops import native
from gpu_worker.running.loading import load_runner
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.scheduling.state.step import StepItems, StepPlan
from octavo.request.sampling import SamplingParams, TokenScore
from octavo.text.tokenizers.tokenizer import open_tokenizer

FAULTS = ("kill", "migration", "swap", "prefix hit", "odd pieces")
ROOT = Path(__file__).parents[2]
STEP_TOKENS = 2048  # of a step of an undisturbed run: prompts come in as large pieces as they can
WAVE = 4  # sequences that run beside each other
MOST_STEPS = 1_000_000
BEFORE = 24  # tokens that a sequence computes before it moves, or is swapped out; those before them are replayed


@dataclass(frozen=True, slots=True)
class Case:
    """A sequence, and what happens to it when it has `at` tokens of output."""

    name: str
    fault: str
    prompt: tuple[int, ...]
    params: SamplingParams
    at: int
    step_tokens: int  # of the steps after the fault
    more: Mapping[str, Any] = field(default_factory=dict)  # what else there is to say of the sequence

    @property
    def key(self) -> str:
        return f"{self.name}.0"

    @property
    def kind(self) -> str:
        drawn = "greedy" if self.params.temperature == 0 else "seeded"
        return drawn if self.params.logprobs is None else f"{drawn}, logprobs"


@dataclass(slots=True)
class Answer:
    """The output of a sequence, and the scores of as many of its last tokens as were asked for."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(slots=True)
class Comparison:
    """What differs between a continued sequence and the undisturbed one."""

    case: Case
    num_tokens: int = 0  # compared
    wrong_tokens: int = 0
    num_scores: int = 0
    wrong_scores: int = 0


def draw_cases(
    text: Sequence[int], count: int, seed: int, lengths: tuple[int, int], outputs: tuple[int, int]
) -> list[Case]:
    """Sequences out of a text, as many for each fault: in turn greedy and seeded, with and without scores."""
    rng, cases = random.Random(seed), []
    for number in range(count):
        output = rng.randint(*outputs)
        length = max(rng.randint(*lengths) - output, 16)
        start = rng.randrange(max(1, len(text) - length))
        turn = number // len(FAULTS)
        params = SamplingParams(
            temperature=float(turn % 2),
            seed=rng.getrandbits(32),
            max_tokens=output,
            ignore_eos=True,
            logprobs=2 if turn // 2 % 2 == 0 else None,
        )
        pieces = rng.choice((1, 2, 3, 5, 7, 13, 33, 61, 97, 200, 333))
        fault = FAULTS[number % len(FAULTS)]
        budget = max(pieces, WAVE) if fault == "odd pieces" else rng.choice((64, 333, STEP_TOKENS))
        prompt = tuple(text[start : start + length])
        cases.append(Case(f"c{number}", fault, prompt, params, rng.randint(1, output - 1), budget))
    return cases


class Engine(MigrationBench):
    """An engine whose tokens and scores are those of the whole output, also of what was continued or computed again."""

    def begin(self, case: Case, output: Sequence[int] = ()) -> None:
        outputs = [list(output)] if output else ()
        self.admit(case.name, list(case.prompt), case.params, outputs=outputs, **case.more)
        self.tokens[case.key] = list(output)

    def has(self, case: Case, num_tokens: int) -> bool:
        return len(self.tokens.get(case.key, ())) >= num_tokens

    def runs(self, case: Case) -> bool:
        return case.name in self.workload.sequences

    def take_answer(self, other: "Engine", case: Case) -> None:
        self.tokens[case.key], self.scores[case.key] = other.tokens[case.key], other.scores[case.key]

    def step(self) -> tuple[StepPlan, StepItems]:
        plan = self.scheduler.plan()
        result = self.scheduler.commit(plan, self.runner.run(plan.input))
        for item in result.items:
            key = f"{item.seq_id}.{item.branch}"
            self.tokens[key] = [*self.tokens.get(key, ())[: item.first_index], *item.token_ids]
            self.scores[key] = [*self.scores.get(key, ())[: item.first_index], *item.scores]
            self.totals[key] = item.cumulative_logprob
        return plan, result

    def swap(self, case: Case, operation: str) -> None:
        self.scheduler.swap(self.sequence(case.name).seq_id, 1, operation)
        if (plan := self.scheduler.plan_moves()) is not None:
            self.runner.run(plan.input)
            self.scheduler.end_moves(plan)

    def answers(self, cases: Sequence[Case]) -> dict[str, Answer]:
        return {case.name: Answer(self.tokens[case.key], self.scores.get(case.key, [])) for case in cases}


class Engines:
    """Two runners of one model, and a new engine on one of them whenever one is asked for."""

    def __init__(self, runners: Sequence[ModelRunner], engine: type[Engine] = Engine) -> None:
        self._runners = runners
        self._engine = engine
        self.info = runners[0].info
        self._faults: dict[str, Callable[[Sequence[Case], dict[str, Answer]], Engine]] = {
            "kill": self._killed,
            "migration": self._migrated,
            "swap": self._swapped,
            "prefix hit": self._hit,
            "odd pieces": self._in_pieces,
        }

    def undisturbed(self, cases: Sequence[Case]) -> dict[str, Answer]:
        engine = self._new(0, STEP_TOKENS)
        for case in cases:
            engine.begin(case)
        engine.finish(MOST_STEPS)
        return engine.answers(cases)

    def continued(self, cases: Sequence[Case], whole: dict[str, Answer]) -> dict[str, Answer]:
        """The same sequences, all with one fault."""
        return self._faults[cases[0].fault](cases, whole).answers(cases)

    def compare(self, cases: Sequence[Case]) -> list[Comparison]:
        whole = self.undisturbed(cases)
        continued = self.continued(cases, whole)
        return [_compare(case, whole[case.name], continued[case.name]) for case in cases]

    def _new(self, number: int, step_tokens: int) -> Engine:
        """An engine with nothing in its blocks. The one before, on the same runner, must not be used any more."""
        return self._engine(
            runner=self._runners[number],
            max_batch_tokens=step_tokens,
            max_batch_sequences=min(16, step_tokens),
            debug=False,
        )

    def _killed(self, cases: Sequence[Case], whole: dict[str, Answer]) -> Engine:
        """Another engine computes prompt and output again, and goes on."""
        engine = self._new(1, cases[0].step_tokens)
        for case in cases:
            engine.begin(case, whole[case.name].tokens[: case.at])
        engine.finish(MOST_STEPS)
        return engine

    def _in_pieces(self, cases: Sequence[Case], whole: dict[str, Answer]) -> Engine:
        engine = self._new(1, cases[0].step_tokens)
        for case in cases:
            engine.begin(case)
        engine.finish(MOST_STEPS)
        return engine

    def _hit(self, cases: Sequence[Case], whole: dict[str, Answer]) -> Engine:
        """Another request has computed the first part of each prompt."""
        engine = self._new(1, cases[0].step_tokens)
        for case in cases:
            length = max(1, len(case.prompt) * case.at // (case.params.max_tokens or 1))
            engine.admit(f"p{case.name}", [*case.prompt[:length], 1], replace(case.params, max_tokens=1))
        engine.finish(MOST_STEPS)
        for case in cases:
            engine.begin(case)
        engine.finish(MOST_STEPS)
        return engine

    def _migrated(self, cases: Sequence[Case], whole: dict[str, Answer]) -> Engine:
        source, target = (self._new(number, cases[0].step_tokens) for number in range(2))
        for case in cases:
            source.begin(case, whole[case.name].tokens[: max(0, case.at - BEFORE)])
        stay = list(cases)
        while source.scheduler.has_work or target.scheduler.has_work:
            for engine in (source, target):
                if engine.scheduler.has_work:
                    engine.step()
            for case in [case for case in stay if source.has(case, case.at)]:
                stay.remove(case)
                if source.runs(case):
                    move(source, target, case.name)
                target.take_answer(source, case)
        for case in stay:
            target.take_answer(source, case)
        return target

    def _swapped(self, cases: Sequence[Case], whole: dict[str, Answer]) -> Engine:
        engine = self._new(1, cases[0].step_tokens)
        for case in cases:
            engine.begin(case, whole[case.name].tokens[: max(0, case.at - BEFORE)])
        due, out = list(cases), list[Case]()
        while engine.scheduler.has_work or out:
            engine.step()
            for case in out:
                engine.swap(case, "in")
            out = [case for case in due if engine.has(case, case.at) and engine.runs(case)]
            for case in out:
                due.remove(case)
                engine.swap(case, "out")
        return engine


def _compare(case: Case, whole: Answer, continued: Answer) -> Comparison:
    pairs = list(zip(whole.tokens, continued.tokens, strict=True))
    scores = list(zip(map(_bits, whole.scores), map(_bits, continued.scores), strict=True))
    return Comparison(case, len(pairs), sum(a != b for a, b in pairs), len(scores), sum(a != b for a, b in scores))


def _bits(score: TokenScore) -> bytes:
    """All that a client is told of a token, bit for bit."""
    told = [(score.token_id, score.logprob), *score.top]
    return b"".join(struct.pack("<Id", *each) for each in told)


def load_engines(model: str, wave: int, longest: int, **options: object) -> Engines:
    """Engines whose blocks suffice for a wave of sequences of the longest length, and host pools for all of them."""
    slots = wave * (longest + 32)
    trial = load_runner(model, device="cpu", kv_cache_bytes=1 << 24, swap_bytes=0, **options)
    num_bytes = trial.info.bytes_per_block * (slots // trial.info.block_size + 2 * wave)
    trial.close()
    sizes = {"kv_cache_bytes": num_bytes, "swap_bytes": num_bytes}
    return Engines([load_runner(model, device="cpu", **sizes, **options) for _ in range(2)])


def waves_of(cases: Sequence[Case], wave: int) -> list[list[Case]]:
    """Cases that run beside each other: of one fault."""
    found = []
    for fault in FAULTS:
        same = [case for case in cases if case.fault == fault]
        found += [same[start : start + wave] for start in range(0, len(same), wave)]
    return found


def text_of(model_tokenizer: str) -> list[int]:
    """Some prose, as tokens."""
    tokenizer = open_tokenizer(model_tokenizer)
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [token for page in pages for token in tokenizer.encode(page.read_text())]


def show(results: dict[str, list[Comparison]]) -> int:
    """Prints a table by instruction set and fault. Returns how many tokens and scores differ."""
    head = ("isa", "fault", "sequences", "past 1024 keys", "tokens", "differ", "logprobs", "differ")
    rows, wrong = [], 0
    for isa, compared in results.items():
        for fault in FAULTS:
            found = [each for each in compared if each.case.fault == fault]
            long = sum(len(each.case.prompt) + each.num_tokens > 1024 for each in found)
            tokens, scores = sum(each.num_tokens for each in found), sum(each.num_scores for each in found)
            differ = sum(each.wrong_tokens for each in found), sum(each.wrong_scores for each in found)
            wrong += sum(differ)
            rows.append((isa, fault, len(found), long, tokens, differ[0], scores, differ[1]))
    for row in (head, *rows):
        print("  ".join(f"{cell!s:>{max(10, len(name))}}" for cell, name in zip(row, head, strict=True)))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="same_bits", description=__doc__)
    parser.add_argument("--sequences", type=int, default=200, help="for each instruction set")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--isa", default="", help="instruction sets, separated by commas; all of the machine")
    parser.add_argument("--lengths", type=int, nargs=2, default=(600, 2000), help="of prompt and output together")
    parser.add_argument("--outputs", type=int, nargs=2, default=(32, 200), help="tokens of output")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    extension = native.load()
    if extension is None:
        print("the extension was not built: make extension")
        return 1
    best, results = extension.isa(), {}
    isas = args.isa.split(",") if args.isa else [isa for isa in reversed(extension.isas()) if isa != "emulated"]
    options = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    for isa in isas:
        extension.select_isa(isa)
        engines = load_engines(args.model, WAVE, max(args.lengths), **options)
        info, began = engines.info, time.monotonic()
        cases = draw_cases(text_of(info.tokenizer), args.sequences, args.seed, args.lengths, args.outputs)
        print(f"{info.model}: {len(cases)} sequences as {info.numerics}", flush=True)
        compared = results.setdefault(isa, [])
        for wave in waves_of(cases, WAVE):
            compared += engines.compare(wave)
            wrong = sum(each.wrong_tokens for each in compared), sum(each.wrong_scores for each in compared)
            done = f"{len(compared)} of {len(cases)} after {time.monotonic() - began:.0f} s"
            print(f"  {done}: {wrong[0]} tokens and {wrong[1]} logprobs differ ({wave[0].fault})", flush=True)
    extension.select_isa(best)
    wrong = show(results)
    print("0 bits differ" if not wrong else f"{wrong} tokens or log probabilities differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
