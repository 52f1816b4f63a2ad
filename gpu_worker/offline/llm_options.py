"""The options of LLM: settings of a worker by octavo's names, and by those that vLLM has for them."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, TypedDict

from gpu_worker.offline.absent import LLM_ARGUMENTS, refuse_absent
from gpu_worker.steps.runner import ADAPTER_BYTES
from octavo.model_files.lora_config import MAX_RANK
from octavo.settings.options import SettingsError
from octavo.settings.setting_sources import from_values
from octavo.settings.worker import WorkerSettings

GIB = 1024**3


class LLMOptions(TypedDict, total=False):
    """The settings of a worker that matter without a service; octavo.settings.WorkerSettings explains each.

    After them come vLLM's names: those in VLLM_NAMES mean settings, those in LORA_COUNTS are bounds that octavo does
    not need, and of the last two, which it does not have, only harmless values pass. None means the default.
    """

    device: str
    dtype: object  # its name, or a torch.dtype
    quantization: str | None
    threads: int
    tensor_parallel: int
    pipeline_parallel: int
    block_size: int
    kv_cache_dtype: str
    kv_cache_bytes: int | str
    gpu_memory_utilization: float
    swap_bytes: int | str
    watermark: float
    adapter_bytes: int | str
    context_tokens: int
    max_batch_tokens: int
    max_batch_sequences: int
    cuda_graphs: str
    batch_invariant: bool
    prefix_caching: bool
    host_tier: bool
    chunked_prefill: bool
    max_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_threshold: int
    preemption: str
    speculation: str
    draft_model: str
    policy: str
    generation_config: str
    packed_cache: str
    packed_cache_bytes: int | str

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_partial_prefills: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool | None
    enable_chunked_prefill: bool | None
    scheduling_policy: str
    preemption_mode: str | None
    swap_space: float
    kv_cache_memory_bytes: int | str | None
    enforce_eager: bool | None
    speculative_config: Mapping[str, object] | None
    enable_lora: bool | None
    max_lora_rank: int | None
    max_loras: int | None
    max_cpu_loras: int | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    trust_remote_code: bool
    disable_log_stats: bool


class RenamedOption(NamedTuple):
    """The setting of a worker that an option of vLLM means, and how its value is converted."""

    setting: str
    convert: Callable[[Any], Any] = lambda value: value


def _gibibytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise ValueError("must be a number of GiB")
    return int(float(value) * GIB)


def _eager(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return "off" if value else "auto"


def _adapter_bytes(value: Any) -> int:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return ADAPTER_BYTES if value else 0


_LOOKUPS = {
    "ngram": ("lookup", {"prompt_lookup_max", "prompt_lookup_min"}),
    "suffix": (
        "recent",
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        },
    ),
}


def _speculation(value: Any) -> str:
    lookup, numbers = _LOOKUPS.get(str(value.get("method")), ("", set())) if isinstance(value, Mapping) else ("", set())
    if not lookup or not value.keys() <= {"method", "num_speculative_tokens", *numbers}:
        raise ValueError(
            "must be {'method': 'ngram'} or {'method': 'suffix'}, with or without vLLM's numbers for it, which octavo "
            "chooses itself; a draft model is draft_model"
        )
    return lookup


VLLM_NAMES: dict[str, RenamedOption] = {
    "max_model_len": RenamedOption("context_tokens"),
    "max_num_seqs": RenamedOption("max_batch_sequences"),
    "max_num_batched_tokens": RenamedOption("max_batch_tokens"),
    "max_num_partial_prefills": RenamedOption("max_partial_prefills"),
    "long_prefill_token_threshold": RenamedOption("long_prefill_threshold"),
    "enable_prefix_caching": RenamedOption("prefix_caching"),
    "enable_chunked_prefill": RenamedOption("chunked_prefill"),
    "scheduling_policy": RenamedOption("policy"),
    "preemption_mode": RenamedOption("preemption"),
    "swap_space": RenamedOption("swap_bytes", _gibibytes),
    "kv_cache_memory_bytes": RenamedOption("kv_cache_bytes"),
    "enforce_eager": RenamedOption("cuda_graphs", _eager),
    "speculative_config": RenamedOption("speculation", _speculation),
    "enable_lora": RenamedOption("adapter_bytes", _adapter_bytes),
    "tensor_parallel_size": RenamedOption("tensor_parallel"),
    "pipeline_parallel_size": RenamedOption("pipeline_parallel"),
}

# vLLM's bounds of adapters, and the most that each may say. Memory for adapters is given in bytes here, and any rank of
# up to MAX_RANK runs, so smaller ones change nothing.
LORA_COUNTS: dict[str, int] = {"max_lora_rank": MAX_RANK, "max_loras": 1 << 20, "max_cpu_loras": 1 << 20}

# vLLM's names of values, by setting.
VLLM_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "quantization": {"gguf": "auto"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "generation_config": {"vllm": "off"},
}

_KNOWN = [
    *(name for name in LLMOptions.__annotations__ if name not in LLM_ARGUMENTS),
    *("model", "tokenizer", "seed", "runner"),
]


def worker_settings(model: str, options: Mapping[str, Any]) -> WorkerSettings:
    """The settings of a worker that the options mean.

    Raises SettingsError for a value that cannot be used, TypeError for a name that does not exist, Unimplemented for
    an argument of vLLM that octavo does not have.
    """
    refuse_absent("LLM", options, _KNOWN, LLM_ARGUMENTS)
    given: dict[str, Any] = {"model": model}
    origins: dict[str, str] = {}
    for name, value in options.items():
        if value is None or name not in _KNOWN:
            continue
        if name in LORA_COUNTS:
            _check_count(name, value)
            continue
        if name == "enable_lora" and value is True and options.get("adapter_bytes") is not None:
            continue  # how much memory is said there
        setting, converted = _setting(name, value)
        if setting in origins:
            raise SettingsError(f"{name}: means the same as {origins[setting]}, which is given as well; leave one out")
        origins[setting], given[setting] = name, converted
    return from_values(WorkerSettings, given)


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= LORA_COUNTS[name]:
        raise SettingsError(f"{name}: must be a whole number from 1 to {LORA_COUNTS[name]}")


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """The name and the value of the setting that one option means."""
    renamed = VLLM_NAMES.get(name, RenamedOption(name))
    setting = renamed.setting
    if name == "dtype" and not isinstance(value, str):
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        value = VLLM_VALUES.get(setting, {}).get(value, value)
    if name in VLLM_NAMES:  # a message then names the option that the caller gave
        try:
            value = renamed.convert(value)
            from_values(WorkerSettings, {setting: value})
        except (ValueError, SettingsError) as error:
            raise SettingsError(f"{name}: {error}") from None
    return setting, value
