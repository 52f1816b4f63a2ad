"""Requests that come and go while others run have the outputs of LLM.generate."""

import itertools
import random
from dataclasses import replace

import pytest
from loras import write_small_lora

from gpu_worker import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutputKind, SamplingParams
from gpu_worker.scheduling.state.load import Load
from gpu_worker.testing import pretended_adapters
from gpu_worker.testing.fake_runner import FakeRunner
from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import InvalidArgument, TooLarge, Unimplemented

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def fake(**sizes) -> FakeRunner:
    return FakeRunner(**{"vocab_size": 128, "generate_eos": False, **sizes})


def with_queue_of(most: int, engine: LLMEngine | None = None, **options) -> LLMEngine:
    """The scheduler's queue takes so many: the others wait outside."""
    engine = engine or LLMEngine(runner=fake(), max_batch_sequences=most, **options)
    offline = engine.llm.engine
    offline._config = replace(offline._config, max_waiting=most)
    offline.start_anew()
    return engine


def expected(prompt, params):
    (output,) = LLM(runner=fake()).generate([prompt], params, use_tqdm=False)
    return [(each.text, each.token_ids, each.finish_reason, each.logprobs) for each in output.outputs]


def finish(engine: LLMEngine) -> dict[str, list]:
    """The outputs of each request, in the order of the steps."""
    found: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def check_idle(engine: LLMEngine) -> None:
    engine.llm.engine.scheduler.check_state()
    load = Load.of(engine.llm.engine.workload)
    assert load.num_sequences == load.num_used_blocks == load.num_waiting == 0


BEAMS = {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0}


def random_params(rng: random.Random) -> SamplingParams:
    chosen = rng.choice(
        [{"n": rng.choice([1, 3]), "temperature": rng.choice([0.0, 0.9])}, {"n": 2, "best_of": 3}, BEAMS]
    )
    return SamplingParams(
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 20),
        logprobs=rng.choice([None, 2]),
        stop=rng.choice([None, ["a"], ["b", "c"]]),
        output_kind=rng.choice([CUMULATIVE, DELTA, FINAL_ONLY]),
        **chosen,
    )


def whole(outputs, kind) -> list:
    """What the outputs of one request say together."""
    if kind is not DELTA:
        return [(each.text, each.token_ids, each.finish_reason, each.logprobs) for each in outputs[-1].outputs]
    said: dict[int, list] = {}
    for output in outputs:
        for each in output.outputs:
            before = said.setdefault(each.index, ["", [], None, None])
            logprobs = None if each.logprobs is None else [*(before[3] or []), *each.logprobs]
            said[each.index] = [before[0] + each.text, before[1] + each.token_ids, each.finish_reason, logprobs]
    return [tuple(said[index]) for index in sorted(said)]


def test_outputs_of_every_kind_say_what_generate_says_whenever_requests_come():
    rng = random.Random(4)
    engine = with_queue_of(4)
    asked, found = {}, {}
    while len(asked) < 40 or engine.has_unfinished_requests():
        if len(asked) < 40 and rng.random() < 0.6:
            prompt = [rng.randrange(100) for _ in range(rng.randrange(1, 30))]
            name, params = f"r{len(asked)}", random_params(rng)
            asked[name] = prompt, params
            assert engine.add_request(name, prompt, params) == name
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    for name, (prompt, params) in asked.items():
        outputs, kind = found[name], params.output_kind
        if params.best_of:  # what is chosen at the end comes at the end
            kind, (_,) = FINAL_ONLY, outputs
        assert whole(outputs, kind) == expected(prompt, params), (name, params)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert kind is not FINAL_ONLY or len(outputs) == 1
        assert kind is DELTA or all(a.outputs != b.outputs for a, b in itertools.pairwise(outputs))
    check_idle(engine)


def test_an_aborted_request_leaves_nothing_and_its_id_may_be_used_again():
    engine = with_queue_of(1)
    for name in "abcd":
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=30))
    engine.step()
    engine.abort_request(["a", "c", "c", "gone"])  # one that runs, one that waits outside
    engine.abort_request("d")
    assert engine.get_num_unfinished_requests() == 1
    engine.add_request("c", [3], SamplingParams(max_tokens=4, output_kind=FINAL_ONLY))
    found = finish(engine)
    assert set(found) == {"b", "c"}
    (output,) = found["c"]
    assert (output.prompt_token_ids, output.outputs[0].finish_reason) == ([3], "length")
    check_idle(engine)


def test_an_adapter_that_waits_for_room_is_not_read_in_every_step(tmp_path, monkeypatch):
    reads = []

    def read(path, *more):
        reads.append(path.name)
        return read_lora(path, *more)

    monkeypatch.setattr(pretended_adapters, "read_lora", read)
    engine = LLMEngine(runner=WitnessRunner(), adapter_bytes=40)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for number, name in enumerate("ab"):
        lora = LoRARequest(name, number + 1, str(write_small_lora(tmp_path / name, number)))
        engine.add_request(name, [1, 2], params, lora_request=lora)
    assert set(finish(engine)) == {"a", "b"}
    assert reads == ["a", "b", "b"]  # and once more when there is room
    prompts = [[1, 2], [1, 2]]
    loras = [LoRARequest(name, 1, str(tmp_path / name)) for name in "ab"]
    reads.clear()
    LLM(runner=WitnessRunner(), adapter_bytes=40).generate(prompts, params, lora_request=loras, use_tqdm=False)
    assert len(reads) <= 5


def test_it_holds_adapters_and_a_tokenizer_as_those_around_it_do(tmp_path):
    lora = LoRARequest("a", 1, str(write_small_lora(tmp_path / "a", 1)))
    assert (lora.name, lora.adapter_id, lora.path) == ("a", 1, str(tmp_path / "a"))
    with LLMEngine(runner=WitnessRunner()) as engine:
        assert [engine.add_lora(lora) for _ in range(2)] == [True, False]
        assert engine.pin_lora(1) and engine.list_loras() == {1}
        assert [engine.remove_lora(1) for _ in range(2)] == [True, False]
        assert engine.get_tokenizer() is engine.llm.get_tokenizer()


def test_those_that_wait_outside_come_in_by_their_priority():
    engine = with_queue_of(1, scheduling_policy="priority")
    for place in range(6):
        engine.add_request(f"late {place}", [1], SamplingParams(max_tokens=3), priority=5)
    engine.add_request("first", [1], SamplingParams(max_tokens=3))
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended.index("first") <= 2  # after the one that runs and the one that the scheduler has


def test_bad_requests_are_refused_by_name_and_the_others_go_on():
    made = LLMEngine.from_engine_args(EngineArgs(runner=fake(num_blocks=8, context_tokens=1000)))
    engine = with_queue_of(1, made)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=4))
    for field, request_id, prompt, params, more in (
        ("request_id", "a", [1], None, {}),
        ("request_id", "", [1], None, {}),
        ("prompt", "b", ["x", "y"], None, {}),
        ("sampling_params.temperature", "b", [1], SamplingParams(), {}),
        ("priority", "b", [1], None, {"priority": 2}),
    ):
        if field.endswith("temperature"):
            params.temperature = -1.0
        with pytest.raises(InvalidArgument) as refused:
            engine.add_request(request_id, prompt, params, **more)
        assert refused.value.field == field
    for more in ({"prompt_adapter_request": "x"}, {"lora_request": LoRARequest("x", 1, "/nowhere")}):
        with pytest.raises(Unimplemented):
            engine.add_request("b", [1], **more)
    engine.add_request("waits outside", [1] * 900, SamplingParams(max_tokens=1))
    found = finish(engine)
    assert found["a"][-1].outputs[0].finish_reason == "length"
    assert found["waits outside"][-1].outputs[0].finish_reason == "error"
    assert "900" in found["waits outside"][-1].failure.message
    with pytest.raises(TooLarge):
        engine.add_request("b", [1] * 900, SamplingParams(max_tokens=1))
    assert not engine.has_unfinished_requests() and engine.step() == []
    check_idle(engine)
