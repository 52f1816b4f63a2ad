"""LLM with low-rank adapters: tokens are those of PEFT, bits are the row's alone, and names mean nothing."""

import copy
import shutil

import pytest
import torch
import transformers
from gguf_converter import convert
from loras import ATTENTION, adapted, greedy, write_gguf_lora, write_lora
from random_models import random_model
from safetensors.torch import load_file, save_file
from transformers_types import DENSE, TYPES

from gpu_worker import LLM, LoRARequest, SamplingParams
from gpu_worker.models.decoders import native_llama
from gpu_worker.ops import native
from octavo.model_files.lora_files import WEIGHTS, read_lora
from octavo.request.errors import BadModel, InvalidArgument, NotFound, TooLarge, Unimplemented

TOKENS = 40
SMALL = {"kv_cache_bytes": "8MiB", "swap_bytes": 0}
FORMS = [
    {"rank": 4, "alpha": 8},
    {"rank": 7, "alpha": 3.5, "size": 0.4},
    {"rank": 64, "alpha": 32, "size": 0.15, "use_rslora": True},
    {"rank": 8, "modules": ATTENTION},
    {"rank": 8, "modules": ("gate_proj", "down_proj"), "dtype": torch.bfloat16},
    {"rank": 8, "dtype": torch.float16, "modules": ("k_proj", "o_proj", "up_proj")},
    {"rank": 4, "rank_pattern": {"q_proj": 16, "down_proj": 2}, "alpha_pattern": {"k_proj": 3}},
]


MORE_FORMS = [
    {"rank": 16, "alpha": 16, "size": 0.2},
    {"rank": 1, "alpha": 2, "modules": ("v_proj", "o_proj")},
    {"rank": 32, "alpha": 64, "size": 0.1, "dtype": torch.bfloat16},
]


@pytest.fixture(scope="module")
def loras(folder, tmp_path_factory):
    """The folders of adapters for the tiny model."""
    where = tmp_path_factory.mktemp("loras")
    return [write_lora(where / f"a{i}", folder[1], seed=i, **form) for i, form in enumerate(FORMS)]


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(request, folder):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "load", lambda: None)
        elif native.load() is None:
            pytest.skip("no extension")
        llm = LLM(str(folder[0]), **SMALL, dtype="float32")
    with llm:
        yield llm


def prompts(count):
    return [[(7 * i + 3 * j) % 256 for j in range(5 + 11 * i % 40)] for i in range(count)]


def params(**more):
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **more)


def ask(llm, prompt, lora, **more):
    return llm.generate([prompt], params(**more), lora_request=lora, use_tqdm=False)[0].outputs[0]


def requests(loras):
    return [LoRARequest(f"n{i}", i + 1, str(path)) for i, path in enumerate(loras)]


def test_adapters_in_one_batch_give_the_tokens_of_the_model_with_each(llm, folder, loras):
    given = prompts(len(loras) + 1)
    outputs = llm.generate(given, params(), lora_request=[*requests(loras), None], use_tqdm=False)
    for prompt, path, output in zip(given, loras, outputs, strict=False):
        with adapted(folder[1], path) as model:
            assert output.outputs[0].token_ids == greedy(model, prompt, TOKENS), path.name
    assert outputs[-1].outputs[0].token_ids == greedy(folder[1], given[-1], TOKENS)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_twin_of_these_tests_is_peft(folder, loras):
    peft = pytest.importorskip("peft")
    for prompt, path in zip(prompts(len(loras)), loras, strict=True):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32)
        with adapted(folder[1], path) as model:
            expected = greedy(model, prompt, TOKENS)
        assert greedy(peft.PeftModel.from_pretrained(base, path).eval(), prompt, TOKENS) == expected, path.name


@pytest.fixture(scope="module")
def of_peft(folder, loras, tmp_path_factory):
    """Ten adapters, and a hundred tokens that PEFT computes with each."""
    peft, where = pytest.importorskip("peft"), tmp_path_factory.mktemp("more")
    more = [write_lora(where / f"a{i}", folder[1], seed=9 + i, **form) for i, form in enumerate(MORE_FORMS)]
    paths = [*loras, *more]
    models = (peft.PeftModel.from_pretrained(copy.deepcopy(folder[1]), path).eval() for path in paths)
    return paths, [greedy(model, prompt, 100) for model, prompt in zip(models, prompts(len(paths)), strict=True)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_ten_adapters_in_one_batch_have_a_hundred_tokens_of_peft(llm, of_peft):
    paths, expected = of_peft
    assert len(paths) == 10
    hundred = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(prompts(10), hundred, lora_request=requests(paths), use_tqdm=False)
    for path, output, tokens in zip(paths, outputs, expected, strict=True):
        assert output.outputs[0].token_ids == tokens, path
        assert len(set(tokens)) > 10, "a model that repeats itself tests little"


@pytest.mark.parametrize("quantization", ["none", "q8"])
def test_bits_are_those_of_the_row_alone(folder, loras, quantization):
    if native.load() is None:
        pytest.skip("torch rounds by shape")
    scored = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
    given, asked = prompts(len(FORMS) + 1), [*requests(loras), None]
    options = {**SMALL, "prefix_caching": False, "quantization": quantization}
    with LLM(str(folder[0]), **options) as llm:
        alone = [
            llm.generate([p], scored, lora_request=r, use_tqdm=False)[0].outputs[0]
            for p, r in zip(given, asked, strict=True)
        ]
        together = llm.generate(given, scored, lora_request=asked, use_tqdm=False)
    with LLM(str(folder[0]), max_batch_tokens=16, **options) as llm:  # prompts in pieces
        pieces = llm.generate(given, scored, lora_request=asked, use_tqdm=False)
    for one, two, three in zip(alone, together, pieces, strict=True):
        assert one.logprobs == two.outputs[0].logprobs == three.outputs[0].logprobs


def test_adapters_in_huge_pages_have_the_bits_of_others(folder, loras, monkeypatch):
    if native.load() is None:
        pytest.skip("they are the extension's")
    scored, found = params(logprobs=3), []
    for pages in (native_llama.FEWEST_PAGES, 0):
        monkeypatch.setattr(native_llama, "FEWEST_PAGES", pages)
        with LLM(str(folder[0]), **SMALL) as llm:
            outputs = llm.generate(prompts(len(loras)), scored, lora_request=requests(loras), use_tqdm=False)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert found[0] == found[1]


def test_a_prefix_is_shared_by_what_the_files_hold_and_not_by_a_name(llm, folder, loras, tmp_path):
    prompt, place = prompts(5)[4] * 2, tmp_path / "adapter"
    shutil.copytree(loras[0], place)
    lora = LoRARequest("one", 1, str(place))
    first = ask(llm, prompt, lora)
    same = llm.generate([prompt], params(), lora_request=LoRARequest("other", 2, str(loras[0])), use_tqdm=False)[0]
    assert same.num_cached_tokens > 0
    assert same.outputs[0].token_ids == first.token_ids
    shutil.rmtree(place)
    shutil.copytree(loras[1], place)
    replaced = llm.generate([prompt], params(), lora_request=lora, use_tqdm=False)[0]
    with adapted(folder[1], loras[1]) as model:
        assert replaced.outputs[0].token_ids == greedy(model, prompt, TOKENS)
    assert ask(llm, prompt, None).token_ids == greedy(folder[1], prompt, TOKENS)


def test_adapters_take_turns_where_memory_holds_one(folder, loras):
    with LLM(str(folder[0]), **SMALL, adapter_bytes="64KiB") as llm:
        with pytest.raises(TooLarge, match="does not fit 65536: give more with --adapter-bytes"):
            ask(llm, [1, 2], requests(loras)[2])
        few = [requests(loras)[i] for i in (0, 1, 6, 5, 3, 0, 6)]
        outputs = llm.generate(prompts(7), params(), lora_request=few, use_tqdm=False)
        assert llm.engine.shelf.num_loaded <= 2 * len({lora.lora_path for lora in few})  # to check and to run
        for prompt, lora, output in zip(prompts(7), few, outputs, strict=True):
            assert ask(llm, prompt, lora).token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("kinds", "a_size"), [(("float16", "float16"), 2), (("float32", "bfloat16"), 4), (("float16", "bfloat16"), 4)]
)
def test_the_bytes_of_an_adapter_are_those_that_are_kept(llm, folder, tmp_path, kinds, a_size):
    """Of B in the types of the files; of A those of one stack lie in one matrix. In torch all have the decoder's."""
    path = write_lora(tmp_path / "a", folder[1], seed=1, rank=8, modules=("q_proj", "k_proj"))
    types = {module: getattr(torch, kind) for module, kind in zip(("q_proj", "k_proj"), kinds, strict=True)}
    tensors = {name: each.to(types[name.split(".")[-3]]) for name, each in load_file(path / WEIGHTS).items()}
    save_file(tensors, path / WEIGHTS)
    adapter = llm.engine.shelf.read(str(path))
    if adapter.native is None:
        assert adapter.num_bytes == 4 * sum(each.numel() for each in tensors.values())
    else:
        sizes = {"A": a_size, "B": 0}
        kept = (each.numel() * (sizes[name.split("_")[-1][0]] or each.itemsize) for name, each in tensors.items())
        assert adapter.num_bytes == sum(kept)


def test_forks_swaps_beams_and_drafts_keep_their_adapter(folder, loras):
    lora, prompt = requests(loras)[0], prompts(3)[2]
    with LLM(str(folder[0]), **SMALL, speculation="off") as llm:
        plain = ask(llm, prompt, lora)
        drawn = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
        (forked,) = llm.generate([prompt], drawn, lora_request=lora, use_tqdm=False)
    with LLM(str(folder[0]), **SMALL, speculation="recent") as llm:
        assert [ask(llm, prompt, lora).token_ids for _ in range(3)] == [plain.token_ids] * 3
        (again,) = llm.generate([prompt], drawn, lora_request=lora, use_tqdm=False)
        assert [each.token_ids for each in again.outputs] == [each.token_ids for each in forked.outputs]


def test_what_is_wrong_is_said_before_a_step(llm, folder, loras, tmp_path):
    config = transformers.LlamaConfig(**{**folder[1].config.to_dict(), "num_hidden_layers": 3, "hidden_size": 64})
    other = write_lora(tmp_path / "other", transformers.LlamaForCausalLM(config), seed=1)
    (tmp_path / "empty").mkdir()
    for error, message, given in (
        (NotFound, "the folder is empty", LoRARequest("x", 1, str(tmp_path / "empty"))),
        (BadModel, "is of layer 2, and the model has 2 layers", LoRARequest("x", 1, str(other))),
        (InvalidArgument, "lora_request: 2 for 1 prompts", [None, None]),
        (InvalidArgument, r"must be LoRARequest\(name, id, path\)", "x"),
    ):
        with pytest.raises(error, match=message):
            ask(llm, [1], given)
    with pytest.raises(Unimplemented, match="lora_request=<LoRARequest>: vectors and scores"):
        llm.embed([[1]], lora_request=requests(loras)[0], use_tqdm=False)
    with LLM(str(folder[0]), **SMALL, adapter_bytes=0) as none:
        with pytest.raises(Unimplemented, match="no memory for adapters"):
            ask(none, [1], requests(loras)[0])


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_adapter_in_a_gguf_file_is_the_one_in_its_folder(llm, folder, loras, tmp_path, arch):
    """llama.cpp interleaves the rows of queries and keys for Llama's models, and for others it does not."""
    heads = folder[1].config.num_attention_heads, folder[1].config.num_key_value_heads
    ranks = write_lora(tmp_path / "ranks", folder[1], seed=1, rank=4, alpha=8, rank_pattern={"q_proj": 16})
    for number, one in enumerate((loras[0], loras[1], ranks)):
        path = write_gguf_lora(tmp_path / f"{number}.gguf", one, arch, heads)
        of_file, of_folder = (LoRARequest("x", 1, str(each)) for each in (path, one))
        assert ask(llm, prompts(1)[0], of_file).token_ids == ask(llm, prompts(1)[0], of_folder).token_ids
        same_order = arch == "qwen2" and one is not ranks
        assert (read_lora(path).digest == read_lora(one).digest) == same_order


@pytest.mark.parametrize("name", ["gemma3", "granite"])
def test_what_adapters_add_is_normed_or_scaled_with_what_it_is_added_to(name, tmp_path):
    kind, fields = DENSE[name]
    model = random_model(getattr(transformers, f"{kind}Config")(**fields), seed=1)
    model.save_pretrained(tmp_path / "model")
    path = write_lora(tmp_path / "lora", model, seed=2)
    prompt = [token % 128 for token in prompts(1)[0]]
    heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    of_file = write_gguf_lora(tmp_path / "lora.gguf", path, name, heads)
    with adapted(model, path), LLM(str(tmp_path / "model"), **SMALL, dtype="float32") as llm:
        for each in (path, of_file):
            assert ask(llm, prompt, LoRARequest("x", 1, str(each))).token_ids == greedy(model, prompt, TOKENS)


def test_adapters_of_a_family_whose_own_rows_come_in_pairs_are_turned_with_its_weights(tmp_path):
    """ERNIE's. Its GGUF files run as a Llama, with rows in the order of one."""
    model = random_model(transformers.Ernie4_5Config(**TYPES["ernie4_5"][1]), seed=1)
    model.save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "model.gguf")
    path = write_lora(tmp_path / "lora", model, seed=2)
    of_file = write_gguf_lora(tmp_path / "lora.gguf", path, "ernie4_5", (4, 2))
    prompt = [token % 128 for token in prompts(1)[0]]
    with adapted(model, path), LLM(str(tmp_path / "model.gguf"), **SMALL, quantization="none") as llm:
        for each in (path, of_file):
            assert ask(llm, prompt, LoRARequest("x", 1, str(each))).token_ids == greedy(model, prompt, TOKENS)
