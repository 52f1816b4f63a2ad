"""Options of LLM: vLLM's names mean settings of a worker, and what octavo does not have is refused by its name."""

import pytest
import torch

from gpu_worker.offline.absent import LLM_ARGUMENTS
from gpu_worker.offline.llm_options import LORA_COUNTS, VLLM_NAMES, LLMOptions, worker_settings
from octavo.request.errors import Unimplemented
from octavo.settings.options import AUTO, SettingsError, options_of
from octavo.settings.worker import WorkerSettings

MEANS = [
    ("max_model_len", 512, "context_tokens", 512),
    ("max_model_len", None, "context_tokens", 0),
    ("context_tokens", 99, "context_tokens", 99),
    ("max_num_seqs", 4, "max_batch_sequences", 4),
    ("max_num_batched_tokens", 64, "max_batch_tokens", 64),
    ("kv_cache_memory_bytes", 4 << 20, "kv_cache_bytes", 4 << 20),
    ("enable_prefix_caching", False, "prefix_caching", False),
    ("enable_chunked_prefill", False, "chunked_prefill", False),
    ("swap_space", 0.5, "swap_bytes", 512 * 1024**2),
    ("swap_bytes", "auto", "swap_bytes", AUTO),
    ("enforce_eager", True, "cuda_graphs", "off"),
    ("enforce_eager", False, "cuda_graphs", "auto"),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 5}, "speculation", "lookup"),
    ("speculative_config", {"method": "suffix"}, "speculation", "recent"),
    ("speculative_config", None, "speculation", "auto"),
    ("dtype", "half", "dtype", "float16"),
    ("dtype", torch.float16, "dtype", "float16"),
    ("quantization", None, "quantization", "auto"),
    ("kv_cache_dtype", "fp8", "kv_cache_dtype", "fp8_e4m3"),
    ("tensor_parallel_size", 2, "tensor_parallel", 2),
    ("pipeline_parallel_size", 2, "pipeline_parallel", 2),
    ("pipeline_parallel_size", None, "pipeline_parallel", 1),
]


@pytest.mark.parametrize(("name", "value", "setting", "expected"), MEANS)
def test_a_name_of_vllm_means_a_setting(name, value, setting, expected):
    assert getattr(worker_settings("smollm2", {name: value}), setting) == expected


def test_every_option_is_a_setting_or_is_accounted_for():
    settings = options_of(WorkerSettings)
    for name in LLMOptions.__annotations__:
        assert name in settings or name in VLLM_NAMES or name in LORA_COUNTS or name in LLM_ARGUMENTS, name
    assert {renamed.setting for renamed in VLLM_NAMES.values()} <= set(settings)
    assert not VLLM_NAMES.keys() & settings.keys()


REFUSED = [
    ({"max_model_len": "long"}, SettingsError, "max_model_len: context_tokens 'long'"),
    ({"swap_space": -1}, SettingsError, "swap_space: must be a number of GiB"),
    ({"enforce_eager": "yes"}, SettingsError, "enforce_eager: must be true or false"),
    ({"speculative_config": {"method": "eagle"}}, SettingsError, "speculative_config: must be {'method': 'ngram'}"),
    ({"dtype": "float8"}, SettingsError, "dtype 'float8'.*must be one of auto, float32, bfloat16, float16"),
    ({"max_model_len": 5, "context_tokens": 6}, SettingsError, "context_tokens: means the same as max_model_len"),
    ({"data_parallel_size": 2}, Unimplemented, "data_parallel_size=2: an LLM runs its model on one device"),
    ({"lora_dtype": "float16"}, Unimplemented, "lora_dtype=.*: an adapter has the type of its files"),
    ({"cpu_offload_gb": 10}, Unimplemented, "cpu_offload_gb=.*: weights stay on the device; use quantization="),
    ({"disable_log_stats": False}, Unimplemented, "disable_log_stats=.*: an LLM logs no statistics"),
    ({"max_model_length": 5}, TypeError, r"LLM has no option 'max_model_length'; did you mean max_model_len\?"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_used_or_is_not_there_is_told_by_the_callers_name(options, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        worker_settings("smollm2", options)
    assert error is not SettingsError or isinstance(caught.value, ValueError)


HARMLESS = {"data_parallel_size": 1, "trust_remote_code": True, "cpu_offload_gb": 0, "revision": None}
HARMLESS |= {"disable_log_stats": True, "load_format": "auto", "tokenizer_mode": "auto", "task": "generate"}
HARMLESS |= {"async_scheduling": True, "enable_sleep_mode": False, "calculate_kv_scales": False}
HARMLESS |= {"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 64, "lora_dtype": "auto", "hf_overrides": {}}


def test_an_argument_that_asks_for_nothing_octavo_lacks_is_accepted():
    assert worker_settings("smollm2", HARMLESS) == worker_settings("smollm2", {})


def test_adapters_get_memory_where_they_are_asked_for():
    def room(**options):
        return worker_settings("smollm2", options).adapter_bytes

    assert (room(), room(enable_lora=None)) == (AUTO, AUTO)
    assert (room(enable_lora=True), room(enable_lora=False)) == (512 << 20, 0)
    assert room(enable_lora=True, adapter_bytes="1MiB", max_loras=2) == 1 << 20
    for wrong in ({"max_lora_rank": 512}, {"max_loras": 0}, {"max_cpu_loras": "8"}, {"enable_lora": "yes"}):
        with pytest.raises(SettingsError, match=f"^{next(iter(wrong))}: must be"):
            room(**wrong)
    with pytest.raises(SettingsError, match="means the same as adapter_bytes"):
        room(adapter_bytes=1, enable_lora=False)
