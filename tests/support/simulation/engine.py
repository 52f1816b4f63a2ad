"""The step loop of a simulated worker: its rounds run on the event loop, and a step takes virtual time."""

import asyncio
import random
from collections.abc import Callable

from gpu_worker.drafting.drafts import LOOKUP, Drafts
from gpu_worker.engine.engine import Engine
from gpu_worker.scheduling.planning.draft_planner import DraftPlanner
from gpu_worker.scheduling.state.sequence import Branch
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import Chooser
from gpu_worker.testing.witness_runner import WitnessContext, WitnessRunner, salt_of
from simulation.loop import HOST
from simulation.pictures import SUPPORT

STEP_S, TOKEN_S = 0.012, 0.0001  # of each step, and of each of its tokens
BLOCKS = 96
SIZES = {"num_blocks": BLOCKS, "num_host_blocks": 16, "context_tokens": 1024, "pictures": SUPPORT}
CHOOSER = Chooser(WitnessRunner(**SIZES).info)
MAX_TOKEN = 900
FREE = 998  # after a prompt that begins with this token, each life of a worker computes other tokens, as devices may do
POISON = 999  # a prompt that ends with this token kills the worker that runs it


class RoundWake:
    """Takes the place of the engine's threading.Event: a wait is noted, and waited for by the driver."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.wanted_s = 0.0

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()
        self.wanted_s = 0.0

    def wait(self, timeout: float) -> None:
        self.wanted_s = timeout

    async def elapse(self) -> None:
        """Waits for as long as the last round wanted, or until the event is set."""
        if self.wanted_s:
            try:
                async with asyncio.timeout(self.wanted_s):
                    await self._event.wait()
            except TimeoutError:
                pass


def install() -> None:
    """Lets every engine of this process run on the event loop."""
    Engine.start = _start
    Engine.stop = _stop
    DraftPlanner._look_up = _guess


def _start(engine: Engine) -> None:
    engine.port.wake = RoundWake()
    engine.driver = asyncio.create_task(_drive(engine))


def _stop(engine: Engine, timeout_s: float = 0.0) -> bool:
    engine._stopping = True
    if hasattr(engine, "driver"):
        engine.driver.cancel()
    engine.port.close()
    return True


async def _drive(engine: Engine) -> None:
    """What Engine._loop does in its thread. The time of a step passes before it, so its result is never early."""
    host = HOST.get()
    try:
        while not engine._stopping:
            if engine._scheduler.has_work and not engine.control._held:
                await asyncio.sleep(engine._runner.next_step_s)
                await asyncio.sleep(max(0.0, host.hangs_until - host.loop.time()))
            engine._round()
            await engine.port.wake.elapse()
            if not engine.port.wake.wanted_s and not engine._scheduler.has_work:
                await asyncio.sleep(0)
    except Exception as error:
        host.loop.call_exception_handler({"message": "the step loop has ended", "exception": error})
        engine.crash = error
    finally:
        engine.port.close()


# Of a request that its client leaves: more than it can get until it is cancelled, if nothing is guessed for it.
ABANDONED_TOKENS = 900


def _guess(planner: DraftPlanner, branch: Branch, most: int) -> Drafts:
    """In place of a lookup, which would seldom be right here: now and then some tokens to come, and a wrong one."""
    rng = random.Random(branch.tokens[-1] << 16 | len(branch.tokens))
    if rng.random() < 0.7 or branch.sequence.params.max_tokens == ABANDONED_TOKENS:
        return Drafts([])
    params, num_right = branch.sequence.params, rng.choice([0, 1, 3])
    context = WitnessContext(0, salt_of(branch.sequence.root), branch.tokens)
    drafts: list[int] = []
    for index in range(branch.num_output, branch.num_output + num_right):
        drafts.append(CHOOSER.token(context.state, params, branch.index, index))
        context.append(drafts[-1])
    return Drafts([*drafts, rng.randrange(MAX_TOKEN)][:most], LOOKUP)


class SimRunner(WitnessRunner):
    """A WitnessRunner whose steps take virtual time, and which a poison token kills."""

    def __init__(self, on_poison: Callable[[list[int]], None], life: int) -> None:
        super().__init__(**SIZES)
        self.next_step_s = STEP_S
        self._on_poison = on_poison
        self._life = life

    def run(self, step: StepInput, *further) -> StepOutput:
        output = super().run(step, *further)
        for seat in self.seats.of_chunks(step):
            if seat.tokens[seat.num_prompt - 1 : seat.num_prompt] == [POISON]:
                self._on_poison(seat.tokens[: seat.num_prompt])
        HOST.get().busy_s += self.next_step_s
        self.next_step_s = STEP_S + TOKEN_S * len(step.tokens)
        for place, sample in enumerate(self.seats.samples(step)):
            if sample.tokens[0] == FREE:
                output.token_ids[place] = 1 + (output.token_ids[place] + self._life) % MAX_TOKEN
        return output
