"""Readers on event loops, a thread for the steps: outputs as of LLM.generate, and nothing is left of who leaves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
from loras import write_small_lora
from waiting import until

from gpu_worker import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, LoRARequest, RequestOutputKind, SamplingParams
from gpu_worker.scheduling.state.load import Load
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.errors import InvalidArgument, OutOfBlocks, RunnerFailed, TooLarge

LONG = SamplingParams(max_tokens=100_000, temperature=0.0)


ENDLESS = {"step_s": 0.001, "context_tokens": 200_000, "num_blocks": 20_000}


def fake(kind=FakeRunner, **sizes) -> FakeRunner:
    return kind(vocab_size=128, generate_eos=False, **sizes)


def params_of(number: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=5 + number, temperature=0.9, logprobs=1, output_kind=kind)


def num_running(llm: AsyncLLM) -> int:
    return Load.of(llm.llm.engine.workload).num_sequences


async def read(llm: AsyncLLM, number: int, kind: RequestOutputKind, *, slow: bool) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate([number, 1], params_of(number, kind), request_id=str(number)):
        (only,) = output.outputs
        tokens = tokens + only.token_ids if kind is RequestOutputKind.DELTA else only.token_ids
        assert only.logprobs is not None and len(only.logprobs) == len(only.token_ids) > 0
        await asyncio.sleep(0.01 if slow else 0)
    assert output.finished and only.finish_reason == "length"
    return tokens


async def test_many_readers_slow_and_quick_get_what_generate_gives():
    kinds = list(RequestOutputKind)
    plain = LLM(runner=fake())
    async with AsyncLLM(runner=fake(), max_batch_sequences=8) as llm:
        found = await asyncio.gather(*(read(llm, i, kinds[i % 3], slow=i % 2 == 0) for i in range(30)))
        for i, tokens in enumerate(found):
            (want,) = plain.generate([[i, 1]], params_of(i, kinds[0]), use_tqdm=False)
            assert tokens == want.outputs[0].token_ids
        await until(lambda: not num_running(llm))


async def test_who_leaves_or_is_aborted_takes_the_request_along():
    args = AsyncEngineArgs(runner=fake(**ENDLESS), enable_log_requests=False)
    llm, reasons = AsyncLLMEngine.from_engine_args(args), []
    async with aclosing(llm.generate([1], LONG, request_id="breaks")) as outputs:
        async for _ in outputs:
            break

    async def follow(name: str) -> None:
        async for output in llm.generate([len(name)], LONG, request_id=name):
            reason = output.outputs[0].finish_reason
        reasons.append(reason)

    readers = [asyncio.create_task(follow(name)) for name in ("a", "bb", "ccc")]
    await until(lambda: num_running(llm) == 3)
    readers[2].cancel()
    await until(lambda: num_running(llm) == 2)
    await llm.abort("a")
    await llm.abort(["bb", "gone", "bb"])
    with pytest.raises(InvalidArgument):
        await llm.abort([["a"]])
    await asyncio.gather(*readers[:2])
    assert reasons == ["abort", "abort"] and not num_running(llm)
    assert [o async for o in llm.generate([2], SamplingParams(max_tokens=1), request_id="ccc")]
    llm.shutdown()


async def test_bad_requests_are_refused_before_they_begin():
    async with AsyncLLM(runner=fake(num_blocks=8, context_tokens=1000, step_s=0.01)) as llm:
        for error, request_id, prompt in (
            (InvalidArgument, "", [1]),
            (InvalidArgument, "a", []),
            (TooLarge, "a", [1] * 900),
        ):
            with pytest.raises(error):
                await anext(llm.generate(prompt, SamplingParams(max_tokens=2), request_id=request_id))
        mailbox = await llm.add_request("a", [1], SamplingParams(max_tokens=100))
        with pytest.raises(InvalidArgument, match="has not ended"):
            await llm.add_request("a", [1])
        while not (await mailbox.get()).finished:
            pass
        with pytest.raises(EOFError):
            await mailbox.get()


class BrokenRunner(FakeRunner):
    breaks = False

    def run(self, step: StepInput, *further) -> StepOutput:
        self.check_device()
        return super().run(step, *further)

    def check_device(self) -> None:
        if self.breaks:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize("end", ["broken", "shut down"])
async def test_every_reader_learns_that_the_engine_has_ended(end):
    llm = AsyncLLM(runner=fake(BrokenRunner, **ENDLESS))
    streams = [llm.generate([i + 1], LONG, request_id=str(i)) for i in range(3)]
    for stream in streams:
        await anext(stream)
    await llm.check_health()
    if end == "broken":
        llm.llm.runner.breaks = True
    else:
        await asyncio.to_thread(llm.shutdown)
    for stream in streams:
        with pytest.raises(RunnerFailed, match="the device is gone" if end == "broken" else end):
            while True:
                await anext(stream)
    assert (llm.errored, llm.is_running) == (end == "broken", False)
    with pytest.raises(RunnerFailed):
        await llm.check_health()
    with pytest.raises(RunnerFailed):
        await anext(llm.generate([1], LONG, request_id="late"))
    llm.shutdown()  # which may be repeated


def test_loops_of_two_threads_share_an_engine_and_a_closed_one_harms_nobody():
    llm = AsyncLLM(runner=fake(**ENDLESS))

    async def follow() -> int:
        return len([o async for o in llm.generate([2], SamplingParams(max_tokens=20), request_id="b")])

    async def all_gone() -> None:
        await until(lambda: not num_running(llm))

    unread = asyncio.run(llm.add_request("nobody reads", [1], LONG))  # its loop is closed now
    with ThreadPoolExecutor(1) as other:
        assert other.submit(asyncio.run, follow()).result(60) > 0
    asyncio.run(all_gone())
    assert unread
    llm.shutdown()


async def test_adapters_are_brought_kept_and_let_go_by_their_numbers(tmp_path):
    """Memory has room for one."""
    first, second, other = (LoRARequest(f"a{i}", i, str(write_small_lora(tmp_path / f"a{i}", i))) for i in (1, 2, 3))
    async with AsyncLLM(runner=WitnessRunner(), adapter_bytes=40) as llm:
        shelf = llm.llm.engine.shelf
        assert await llm.get_tokenizer() is llm.llm.get_tokenizer()
        assert llm.get_default_sampling_params() == llm.llm.get_default_sampling_params()
        assert await llm.add_lora(first)
        assert not await llm.add_lora(first)
        assert await llm.add_lora(second)  # the first one has gone
        with pytest.raises(InvalidArgument, match="lora_id: 1 is not in memory"):
            await llm.pin_lora(1)
        assert await llm.pin_lora(2)
        with pytest.raises(OutOfBlocks, match="32 of 40 bytes for adapters are in use"):
            await llm.add_lora(other)
        assert (await llm.list_loras(), shelf.num_loaded) == ({1, 2}, 2)
        assert await llm.remove_lora(2)
        assert not await llm.remove_lora(2)
        assert await llm.add_lora(other)
        params = SamplingParams(max_tokens=3)
        outputs = [output async for output in llm.generate([1, 2], params, request_id="x", lora_request=other)]
        assert (outputs[-1].finished, shelf.num_loaded) == (True, 3)
        with pytest.raises(InvalidArgument, match="lora_request: must be LoRARequest"):
            await llm.add_lora("a")
