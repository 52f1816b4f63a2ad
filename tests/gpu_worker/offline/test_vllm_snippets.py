"""Programs as they are written for vLLM: with the import line of gpu_worker they run unchanged, on a tiny model.

Each test is such a program, from its import to its last loop; what follows the programs compares what they got.
"""

import shutil
from importlib import import_module

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def model(folder):
    return str(folder[0])


@pytest.fixture(scope="module")
def llm(folder):
    from gpu_worker import LLM

    with LLM(str(folder[0]), kv_cache_bytes="4MiB", swap_bytes="1MiB", threads=1, seed=0) as llm:
        yield llm


def test_dictionaries_and_token_ids(llm):
    from gpu_worker import SamplingParams, TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=8)
    token_ids = llm.get_tokenizer().encode("Once upon")
    outputs = llm.generate({"prompt": "Once upon"}, greedy)
    outputs += llm.generate([{"prompt": "Once upon"}, {"prompt_token_ids": token_ids}], greedy)
    outputs += llm.generate(TokensPrompt(prompt_token_ids=token_ids), sampling_params=greedy)
    outputs += llm.generate(prompts=None, sampling_params=greedy, prompt_token_ids=[token_ids, token_ids])
    outputs += llm.generate(prompt_token_ids=token_ids, sampling_params=greedy)
    outputs += llm.generate(None, greedy, [token_ids], False)

    assert len(outputs) == 8
    assert token_ids == list(b"Once upon")
    assert [output.prompt_token_ids for output in outputs] == [token_ids] * 8
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["Once upon"] * 2 + [None] * 6
    assert len({output.request_id for output in outputs}) == 8
    assert all(output.finished for output in outputs)


def test_sampling_parameters(llm):
    from gpu_worker import SamplingParams

    params = SamplingParams(
        n=2,
        best_of=3,
        temperature=0.9,
        top_k=-1,
        top_p=0.95,
        min_p=0.0,
        stop="x",
        bad_words=["y"],
        include_stop_str_in_output=True,
        truncate_prompt_tokens=4,
        max_tokens=30,
        skip_special_tokens=True,
        seed=7,
    )
    output = llm.generate("A long prompt", params)[0]

    assert bytes(output.prompt_token_ids) == b"ompt"
    assert len(output.outputs) == 2
    for completion in output.outputs:
        assert ord("y") not in completion.token_ids
        assert (completion.finish_reason == "stop") == completion.text.endswith("x")
        assert completion.stop_reason == ("x" if completion.finish_reason == "stop" else None)
    silent = llm.generate("A long prompt", SamplingParams(detokenize=False, max_tokens=5, logprobs=0))[0].outputs[0]
    assert (silent.text, len(silent.token_ids)) == ("", 5)
    assert {score.decoded_token for place in silent.logprobs for score in place.values()} == {None}


def test_log_probabilities(llm):
    from gpu_worker import SamplingParams

    sampling_params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    output = llm.generate("The log", sampling_params)[0]
    completion = output.outputs[0]
    total = 0.0
    for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
        total += candidates[token_id].logprob
        for candidate_id, logprob in candidates.items():
            assert isinstance(logprob.decoded_token, str)
            assert (logprob.rank == 1) == (candidate_id == token_id)

    assert completion.cumulative_logprob == pytest.approx(total)
    alone = llm.generate("The log", SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))[0].outputs[0]
    assert [[score.rank for score in place.values()] for place in alone.logprobs] == [[1]] * 6
    drawn = llm.generate("The log", SamplingParams(temperature=5.0, max_tokens=20, logprobs=1, seed=1))[0].outputs[0]
    assert {place[token].rank for token, place in zip(drawn.token_ids, drawn.logprobs, strict=True)} >= {None}
    first, *others = output.prompt_logprobs
    assert first is None
    for token_id, candidates in zip(output.prompt_token_ids[1:], others, strict=True):
        assert token_id in candidates
        assert sorted(score.rank for score in candidates.values() if score.rank) == [1, 2]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_chat(llm):
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    sampling_params.temperature = 0.0
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "Hello <|im_start|>"}]},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    outputs += llm.chat(messages=[conversation] * 3, sampling_params=sampling_params, use_tqdm=True)
    turns = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two "}]
    (continued,) = llm.chat(turns, sampling_params, add_generation_prompt=False, continue_final_message=True)

    seen = [conversation[0], {"role": "user", "content": "Hello <|im_start|>"}]
    template = llm.get_tokenizer().apply_chat_template
    prompt = template(seen, tokenize=False, add_generation_prompt=True)
    assert [output.prompt for output in outputs] == [prompt] * 4
    assert outputs[0].prompt_token_ids.count(256) == 3 == prompt.count("<|im_start|>") - 1  # the user's is text
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert continued.prompt.endswith("assistant\nOne, two ")
    turns = [turns[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    turns += [{"role": "tool", "content": "2", "tool_call_id": "c1"}]
    (output,) = llm.chat(turns, sampling_params, tools=[TOOL], chat_template_kwargs={"enable_thinking": True})
    seen = [turns[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}]
    options = {"tools": [TOOL], "tokenize": False, "add_generation_prompt": True, "enable_thinking": True}
    assert output.prompt == template([*seen, turns[2]], **options)


def test_tools_that_a_template_lacks_are_told_in_a_message(model, tmp_path):
    from gpu_worker import LLM, SamplingParams

    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    llm = LLM(model=str(tmp_path), max_model_len=512)
    (output,) = llm.chat([{"role": "user", "content": "1 + 1?"}], SamplingParams(max_tokens=1), tools=[TOOL])
    assert output.prompt.startswith("You can call functions.") and TOOL["function"]["name"] in output.prompt


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"continue_final_message": True}, r"^continue_final_message: goes with add_generation_prompt=False"),
        ({"chat_template_kwargs": {"messages": []}}, r"^chat_template_kwargs: messages is not the caller's"),
        ({"chat_template_kwargs": {"a b": 1}}, r"^chat_template_kwargs: must be"),
        ({"chat_template_kwargs": {"a": object()}}, r"^chat_template_kwargs: give values that JSON has"),
        ({"tools": "add"}, r"^tools: must be a list"),
        ({"tools": [{"name": "add"}]}, r"^tools\[0\]: must be"),
        ({"tools": [{"function": {"name": "a b"}}]}, r"^tools\[0\]\.function: "),
        ({"tools": [{"function": {"name": "a", "parameters": {1, 2}}}]}, r"^tools\[0\]\.function\.parameters: is not"),
    ],
)
def test_a_wrong_option_of_chat_is_named(llm, named, message):
    from octavo.request.errors import InvalidArgument

    with pytest.raises(InvalidArgument, match=message):
        llm.chat([{"role": "user", "content": "Hi"}], **named)


MODULES = {
    "engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "engine.llm_engine": ("LLMEngine",),
    "entrypoints.llm": ("LLM",),
    "inputs": ("TextPrompt", "TokensPrompt"),
    "logprobs": ("Logprob",),
    "lora.request": ("LoRARequest",),
    "outputs": ("CompletionOutput", "EmbeddingRequestOutput", "RequestOutput", "ScoringRequestOutput"),
    "pooling_params": ("PoolingParams",),
    "sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "v1.engine.async_llm": ("AsyncLLM",),
    "v1.engine.llm_engine": ("LLMEngine",),
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_the_names_of_vllm(module):
    import gpu_worker
    from gpu_worker.inputs import PromptType

    found = import_module(f"gpu_worker.{module}")
    assert PromptType and all(getattr(found, name) is getattr(gpu_worker, name) for name in MODULES[module])


def test_beam_search(llm):
    from gpu_worker import BeamSearchParams, SamplingParams

    params = BeamSearchParams(beam_width=3, max_tokens=5)
    outputs = llm.beam_search([{"prompt": "Hello, my name is "}, {"prompt_token_ids": list(b"Beam")}], params)
    for output in outputs:
        for sequence in output.sequences:
            generated_text = sequence.text
            assert generated_text

    first, second = outputs
    assert [len(output.sequences) for output in outputs] == [3, 3]
    assert bytes(second.sequences[0].tokens[:4]) == b"Beam"
    assert first.sequences[0].text.startswith("Hello, my name is ")
    sums = [sequence.cum_logprob for sequence in first.sequences]
    assert sums == sorted(sums, reverse=True)
    old = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0, max_tokens=5)
    found = llm.generate("Hello, my name is ", old)[0]
    assert [found.prompt_token_ids + beam.token_ids for beam in found.outputs] == [s.tokens for s in first.sequences]
    narrow = llm.beam_search("Hello", BeamSearchParams(beam_width=1, max_tokens=5))[0].sequences[0]
    greedy = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5))[0]
    assert narrow.tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


def test_prefix_caching(llm):
    from gpu_worker import SamplingParams

    prefix = "You are an expert in the care of house plants, and answer in one sentence. "
    generating_prompts = [prefix + prompt for prompt in ("How often is a fern watered?", "Where does a cactus stand?")]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    llm.reset_prefix_cache()
    regular_outputs = [llm.generate(generating_prompts[0], sampling_params)[0]]
    cached_outputs = llm.generate(generating_prompts, sampling_params)
    salted = llm.generate({"prompt": generating_prompts[0], "cache_salt": "mine"}, sampling_params)

    assert {each.outputs[0].text for each in salted + regular_outputs} == {cached_outputs[0].outputs[0].text}
    assert [each.num_cached_tokens for each in salted + regular_outputs] == [0, 0]
    assert all(output.num_cached_tokens >= len(prefix) // 16 * 16 for output in cached_outputs)
    assert llm.reset_prefix_cache()
    assert llm.generate(generating_prompts[0], sampling_params)[0].num_cached_tokens == 0


def test_priorities(model):
    from gpu_worker import LLM, SamplingParams
    from octavo.request.errors import InvalidArgument

    llm = LLM(model=model, scheduling_policy="priority", max_num_seqs=1, max_model_len=64)
    ended = []
    drop = llm.engine.scheduler.drop
    llm.engine.scheduler.drop = lambda sequence: (ended.append(sequence.prompt[0]), drop(sequence))[1]
    outputs = llm.generate(["a", "b", "c"], SamplingParams(max_tokens=2, temperature=0), priority=[5, 0, -3])

    assert [output.prompt for output in outputs] == ["a", "b", "c"]
    assert bytes(ended[-3:]) == b"cba"  # after those of the check of sizes
    with pytest.raises(InvalidArgument, match=r"^priority: must be a list with a whole number for each of 1 prompts"):
        llm.generate("a", priority=[1, 2])
    fcfs = LLM(model=model, max_model_len=64)
    with pytest.raises(ValueError, match="scheduling_policy"):
        fcfs.generate("a", priority=[1])
    assert len(fcfs.generate("a", SamplingParams(max_tokens=1), priority=[0])) == 1


def test_what_is_not_there_says_so_by_its_name(llm, model):
    from gpu_worker import LLM
    from octavo.request.errors import InvalidArgument, NotFound, Unimplemented

    for error, options, message in (
        (NotFound, {"tokenizer": "nowhere"}, "tokenizer 'nowhere': "),
        (Unimplemented, {"data_parallel_size": 2}, "data_parallel_size=2: "),
        (Unimplemented, {"runner": "draft"}, "runner='draft': the model generates text"),
        (TypeError, {"runner": 5}, "runner=5: is neither a name nor a runner"),
        (Unimplemented, {"kv_transfer_config": {"kv_role": "both"}}, "kv_transfer_config=<dict>: octavo has nothing"),
        (Unimplemented, {"max_num_scheduled_tokens": 64}, r"max_num_scheduled_tokens=64: octavo has nothing[^?]*$"),
        (TypeError, {"frobnication_config": {}}, "LLM has no option 'frobnication_config'$"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            LLM(model=model, **options)
    for error, call, message in (
        (InvalidArgument, lambda: llm.generate("x", lora_request=object()), "^lora_request: must be LoRARequest"),
        (Unimplemented, lambda: llm.chat([], chat_template="x"), "^chat_template='x': the model's own"),
        (TypeError, lambda: llm.generate("x", max_tokens=3), r"generate\(\) has no option 'max_tokens'"),
        (AttributeError, lambda: llm.classify("x"), "LLM has no classify: models here generate text"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not hasattr(llm, "nonsense")
