"""Sequences of a real model with drafts and without, also moved and taken over between such workers: equal or not?

    make same-drafts ARGS='--tokens 100000'

The undisturbed run has no drafts. The other one has right drafts, wrong ones, and those that lookups find, and half of
its engines have none. Faults are those of `same_bits`; what is compared is each token and the bits of each score.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import same_bits
from same_bits import Answer, Case, Engine, Engines, load_engines, show, text_of, waves_of

from gpu_worker.drafting.drafts import LOOKUP, Drafts
from gpu_worker.ops import native
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.scheduling.state.sequence import Branch
from octavo.request.sampling import SamplingParams

TEMPERATURES = (0.0, 0.7, 1.3)
PENALTIES = (
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"min_tokens": 20, "stop_token_ids": (28, 30), "banned_token_ids": (198,)},
)


class DraftedEngines(Engines):
    """Of the engines after a fault every other one has drafts."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        super().__init__(runners)
        self.rng = random.Random(5)
        self.tally: Counter[str] = Counter()
        self.whole: dict[str, Answer] = {}
        self.engines: list[Engine] = []
        self.is_undisturbed = True

    def undisturbed(self, cases: Sequence[Case]) -> dict[str, Answer]:
        self.is_undisturbed = True
        return super().undisturbed(cases)

    def continued(self, cases: Sequence[Case], whole: dict[str, Answer]) -> dict[str, Answer]:
        self.whole, self.is_undisturbed = whole, False
        return super().continued(cases, whole)

    def _new(self, number: int, step_tokens: int) -> Engine:
        drafted = not self.is_undisturbed and (number == 1 or self.rng.random() < 0.5)
        engine = Engine(
            runner=self._runners[number],
            max_batch_tokens=step_tokens,
            max_batch_sequences=min(64, step_tokens),
            debug=False,
            speculation="recent" if drafted else "off",
        )
        planner = engine.scheduler._planner
        if planner.drafts is not None:
            look_up = planner.drafts._look_up
            planner.drafts._look_up = lambda branch, most: self._guess(branch, most) or look_up(branch, most)
        self.engines.append(engine)
        return engine

    def _guess(self, branch: Branch, most: int) -> Drafts | None:
        """The tokens to come up to a random one, and any others after it; none, for the lookup to be asked."""
        rng = self.rng
        ahead = self.whole[branch.sequence.seq_id].tokens[branch.num_output :][: rng.choice((0, 1, 2, 5, 12))]
        wrong = [rng.randrange(self.info.vocab_size) for _ in range(rng.choice((0, 0, 1, 3)))]
        return Drafts([*ahead, *wrong][:most], LOOKUP) if rng.random() < 0.7 else None

    def count_drafts(self) -> None:
        for engine in self.engines:
            self.tally["drafts"] += sum(engine.workload.num_drafts.values())
            self.tally["accepted"] += sum(engine.workload.num_accepted_drafts.values())
        self.engines = []


def drafted_cases(
    text: Sequence[int], count: int, seed: int, lengths: tuple[int, int], outputs: tuple[int, int]
) -> list[Case]:
    """The cases of `same_bits` with other temperatures, penalties, and ends."""
    cases = []
    for number, case in enumerate(same_bits.draw_cases(text, count, seed, lengths, outputs)):
        turn = number // len(same_bits.FAULTS)
        params: SamplingParams = replace(
            case.params,
            temperature=TEMPERATURES[turn % len(TEMPERATURES)],
            top_p=(1.0, 0.9)[turn % 2],
            logprobs=(2, None, 0, None)[turn // 3 % 4],
            **PENALTIES[turn // 3 % len(PENALTIES)],
        )
        cases.append(replace(case, params=params))
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="same_drafts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of output, about")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--isa", default="")
    parser.add_argument("--lengths", type=int, nargs=2, default=(200, 700), help="of prompt and output together")
    parser.add_argument("--outputs", type=int, nargs=2, default=(64, 180), help="tokens of output")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--wave", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    extension = native.load()
    if extension is None:
        print("the extension was not built: make extension")
        return 1
    if args.isa:
        extension.select_isa(args.isa)
    options = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype, "dtype": args.dtype}
    loaded = load_engines(args.model, args.wave, max(args.lengths), **options)
    engines, began = DraftedEngines(loaded._runners), time.monotonic()
    count = 2 * args.tokens // sum(args.outputs)
    cases = drafted_cases(text_of(engines.info.tokenizer), count, args.seed, args.lengths, args.outputs)
    print(f"{engines.info.model}: {len(cases)} sequences as {engines.info.numerics}", flush=True)
    compared = []
    for wave in waves_of(cases, args.wave):
        compared += engines.compare(wave)
        engines.count_drafts()
        wrong = sum(each.wrong_tokens for each in compared), sum(each.wrong_scores for each in compared)
        done = f"{len(compared)} of {len(cases)} after {time.monotonic() - began:.0f} s"
        tally = f"{engines.tally['accepted']} of {engines.tally['drafts']} drafts accepted"
        print(f"  {done}: {wrong[0]} tokens and {wrong[1]} logprobs differ ({wave[0].fault}); {tally}", flush=True)
    wrong_bits = show({extension.isa(): compared})
    print("0 bits differ" if not wrong_bits else f"{wrong_bits} tokens or log probabilities differ")
    return 1 if wrong_bits else 0


if __name__ == "__main__":
    sys.exit(main())
