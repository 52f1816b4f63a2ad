"""What vLLM's LLM, SamplingParams and generate take and octavo does not have: each name, and what to do instead.

A value that asks for nothing octavo lacks (`tensor_parallel_size=1`) is accepted. Any other value is refused by its
name: no argument is silently ignored.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar

from octavo.request.errors import Unimplemented, closest


@dataclass(frozen=True, slots=True)
class AbsentArgument:
    """An argument that octavo does not have: the values that ask for nothing, and what to do instead of the others."""

    remedy: str
    harmless: tuple[object, ...] = (None, False)


def _absent(names: Iterable[str], remedy: str, *harmless: object) -> dict[str, AbsentArgument]:
    return {name: AbsentArgument(remedy, (None, False, *harmless)) for name in names}


_ONE_DEVICE = "an LLM runs its model on one device; leave it out, and choose the device with device="
_OWN_FILES = "the files are those of `model`; download that revision and give its directory as model="
_NO_FOREIGN_CODE = "no code of a checkpoint is run; leave it out"
_ADAPTERS = "LoRA and prompt adapters are not served; merge the adapter into the weights and load the merged model"
_GUIDED = "guided decoding is not there; use allowed_token_ids, logit_bias or stop, and check the answer"
_SPECULATION = "speculative decoding is not there; leave it out, the tokens are the same without it"
_MEDIA = "models here read text only; give prompt or prompt_token_ids"
_PLUGINS = "no code of the caller runs inside a step; use logit_bias, allowed_token_ids or banned_token_ids"
_TEXT_ONLY = "the model generates text; leave it out"

_NOT_THERE = "octavo has nothing that this would set; leave it out"
# Further arguments of vLLM's engine, of today's and of earlier ones: of parts that octavo does not have.
_FURTHER_NAMES = """
    additional_config all2all_backend allow_deprecated_quantization allowed_media_domains attention_backend
    attention_config collect_detailed_traces cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
    cpu_offload_params cuda_graph_sizes cudagraph_capture_sizes cudagraph_metrics data_parallel_address
    data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    dcp_q_replicate decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
    disable_chunked_mm_input disable_hybrid_kv_cache_manager disable_mm_preprocessor_cache
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_timeout_seconds dp_sync_interval
    ec_manager_config ec_transfer_config enable_batch_sharded_sampling enable_bf16x3_router_gemm
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_fault_tolerance
    enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_mm_processor_stats enable_moe_shared_loras enable_multimodal_encoder_data_parallel
    enable_nccl_comm_suspend enable_prompt_embeds enable_reasoning enable_return_routed_experts
    enable_tower_connector_lora enable_trace_replay eplb_config expert_placement_strategy fail_on_environ_validation
    fault_tolerance_config fully_sharded_loras gdn_prefill_backend guided_decoding_disable_fallback hf_config_path
    ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose
    kda_prefill_backend kernel_config kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample
    kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config
    language_model_only linear_backend logits_processor_pattern lora_dtype lora_extra_vocab_size lora_target_modules
    mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
    mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port max_cpu_loras max_cudagraph_capture_size
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_parallel_loading_workers
    max_prompt_adapter_token max_prompt_adapters media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
    mm_processor_cache_type mm_processor_device mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides
    model_loader_extra_config moe_backend multi_step_stream_outputs nnodes node_rank num_lookahead_slots
    num_redundant_experts numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step otlp_traces_endpoint override_attention_dtype
    override_neuron_config per_request_spec_decode_metrics prefill_context_parallel_size prefill_schedule_interval
    prefix_cache_retention_interval prefix_match_unit profiler_config pt_load_map_location quantization_config
    ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers
    replayssm_buffer_len safetensors_load_strategy scheduler_delay_factor scheduler_reserve_full_isl
    show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling specialize_active_lora
    tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type tokens_only tool_parser_plugin ubatch_size
    use_fp64_gumbel use_replayssm video_pruning_method video_pruning_rate weight_transfer_config
"""

LLM_ARGUMENTS: dict[str, AbsentArgument] = {
    **_absent(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "context_parallel_size"),
        _ONE_DEVICE,
        1,
    ),
    **_absent(("distributed_executor_backend", "worker_use_ray", "worker_cls", "enable_expert_parallel"), _ONE_DEVICE),
    # With one device nothing is reduced, so either value comes true.
    **_absent(("disable_custom_all_reduce",), _ONE_DEVICE, True),
    # A permission, which is never used: a model that needs its own code is refused when it is loaded.
    **_absent(("trust_remote_code",), _NO_FOREIGN_CODE, True),
    **_absent(("revision", "tokenizer_revision", "code_revision", "download_dir", "hf_token"), _OWN_FILES),
    **_absent(("load_format",), _OWN_FILES, "auto", "safetensors", "gguf"),
    **_absent(("tokenizer_mode",), "there is one kind of tokenizer; leave it out", "auto"),
    **_absent(
        ("skip_tokenizer_init",), "the tokenizer is always loaded; give token ids, and SamplingParams(detokenize=False)"
    ),
    **_absent(("hf_overrides", "rope_scaling", "rope_theta"), "change config.json in the model's directory", {}),
    **_absent(
        ("cpu_offload_gb",), "weights stay on the device; use quantization= or a GGUF file with smaller weights", 0
    ),
    **_absent(
        ("max_seq_len_to_capture", "max_context_len_to_capture"), "CUDA graphs have no limit of length; leave it out"
    ),
    **_absent(
        ("compilation_config",), "there is no compiler to configure; enforce_eager=True leaves out CUDA graphs", 0
    ),
    **_absent(("num_gpu_blocks_override",), "give the memory for blocks instead: kv_cache_bytes='2GiB'"),
    **_absent(("enable_lora", "max_loras", "max_lora_rank", "enable_prompt_adapter"), _ADAPTERS),
    **_absent(
        [
            "speculative_config",
            "speculative_model",
            "num_speculative_tokens",
            "spec_method",
            "spec_model",
            "spec_tokens",
        ],
        _SPECULATION,
    ),
    **_absent(("guided_decoding_backend", "structured_outputs_config"), _GUIDED, "auto"),
    **_absent(("limit_mm_per_prompt", "mm_processor_kwargs", "allowed_local_media_path"), _MEDIA, {}, ""),
    **_absent(("task", "convert"), _TEXT_ONLY, "auto", "generate", "none"),
    **_absent(("override_pooler_config", "pooler_config"), _TEXT_ONLY),
    **_absent(("logits_processors",), _PLUGINS, []),
    "disable_log_stats": AbsentArgument("an LLM logs no statistics; leave it out", (None, True)),
    **_absent(
        ("disable_async_output_proc", "use_v2_block_manager"), "there is one way of doing this; leave it out", True
    ),
    **_absent(("num_scheduler_steps",), "each step is planned by itself; leave it out", 1),
    **_absent(("max_logprobs",), "a token has at most 20 log probabilities beside it", *range(21)),
    **_absent(("served_model_name",), "an LLM is called by no name; leave it out"),
    # Either value comes true: which step is planned when changes no token.
    **_absent(("async_scheduling", "use_tqdm_on_load", "aggregate_engine_logging"), "", True),
    **_absent(("enable_sleep_mode",), "use close(), and make a new LLM later"),
    **_absent(("calculate_kv_scales",), "scales of an fp8 cache come from the checkpoint, or are 1; leave it out"),
    **_absent(("scheduler_cls", "worker_extension_cls"), "the engine's parts are octavo's own; leave it out"),
    **_absent(("override_generation_config",), "give the values as SamplingParams(…)", {}),
    **_absent(("chat_template",), "put the template into the model's directory as chat_template.jinja"),
    **_absent(("model_impl",), "octavo chooses how a model is run; leave it out", "auto"),
    **_absent(("config_format",), _OWN_FILES, "auto", "hf"),
    **_absent(("logprobs_mode",), "log probabilities are of adjusted logits; leave it out", "processed_logprobs"),
    **_absent(("prefix_caching_hash_algo",), "there is one hash of blocks; leave it out", "sha256"),
    **_absent(("stream_interval", "optimization_level", "performance_mode"), _NOT_THERE, 1, 2, "balanced"),
    **_absent(_FURTHER_NAMES.split(), _NOT_THERE, {}, [], 0, 1),
}

PARAMS_ARGUMENTS: dict[str, AbsentArgument] = {
    **_absent(("guided_decoding", "structured_outputs"), _GUIDED),
    **_absent(("logits_processors",), _PLUGINS, []),
    **_absent(("early_stopping",), "a beam search ends when no beam can become one of the best any more"),
    **_absent(("output_kind",), "an LLM returns whole answers; octavo.client streams"),
    **_absent(("extra_args",), _PLUGINS, {}),
    # Text is made of the bytes of tokens, which have their spaces within them.
    **_absent(("spaces_between_special_tokens",), "", True),
    **_absent(("flat_logprobs",), "log probabilities are a list of dictionaries; leave it out"),
    **_absent(("logprob_token_ids", "prompt_logprob_token_ids"), "ask for the likeliest tokens with logprobs="),
    **_absent(
        ("skip_reading_prefix_cache",), "give each prompt a cache_salt of its own, or enable_prefix_caching=False"
    ),
    **_absent(("thinking_token_budget",), "use max_tokens"),
    **_absent(("repetition_detection",), "use repetition_penalty"),
}

BEAM_ARGUMENTS: dict[str, AbsentArgument] = {
    **_absent(("logprobs",), "each sequence has the candidates of each step as logprobs; leave it out"),
    **_absent(("stop",), "use SamplingParams(beam_width=…, stop=…) with generate()"),
}

CALL_ARGUMENTS: dict[str, AbsentArgument] = {
    **_absent(("lora_request", "prompt_adapter_request"), _ADAPTERS),
    **_absent(("guided_options_request", "guided_options"), _GUIDED),
    **_absent(("tokenization_kwargs",), "use SamplingParams(truncate_prompt_tokens=…), or give token ids", {}),
    **_absent(("mm_processor_kwargs",), _MEDIA, {}),
    **_absent(("concurrency_limit",), "use max_num_seqs of LLM"),
}

CHAT_ARGUMENTS: dict[str, AbsentArgument] = {
    **CALL_ARGUMENTS,
    **_absent(
        ("chat_template",), "the model's own template is used; put another into its directory as chat_template.jinja"
    ),
    **_absent(
        ("chat_template_content_format",),
        "the texts of a message are joined by newlines; leave it out",
        "auto",
        "string",
    ),
    **_absent(("documents",), "documents are not there; put their texts into a message", []),
}

PROMPT_KEYS: dict[str, AbsentArgument] = {
    **_absent(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), _MEDIA, {}),
    **_absent(("prompt_embeds",), "a prompt is text or token ids; give prompt or prompt_token_ids"),
    **_absent(
        ("encoder_prompt", "decoder_prompt"), "encoder-decoder models are not served; give prompt or prompt_token_ids"
    ),
    **_absent(("token_type_ids",), _TEXT_ONLY),
    **_absent(("type",), "leave it out", "text", "token"),
}

METHODS: dict[str, str] = {
    **dict.fromkeys(
        ("embed", "encode", "classify", "score", "reward"), "models here generate text; use generate() or chat()"
    ),
    **dict.fromkeys(("sleep", "wake_up"), "use close(), and make a new LLM later"),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine"), "the engine runs in this process: see LLM.engine"),
    **dict.fromkeys(("start_profile", "stop_profile", "get_metrics"), "an LLM has no profiler of its own"),
    "set_tokenizer": "give tokenizer= to LLM",
}

Params = TypeVar("Params", bound=type[Any])


def is_generating(runner: object) -> bool:
    """Whether `runner` is None or vLLM's name of a model that generates text; not if it is a runner that exists.

    Raises Unimplemented for another name, and TypeError for what is neither.
    """
    if isinstance(runner, str) and runner not in ("auto", "generate"):
        raise Unimplemented(f"runner={_shown(runner)}: {_TEXT_ONLY}")
    if runner is None or isinstance(runner, str):
        return True
    if not hasattr(runner, "info"):
        raise TypeError(f"runner={_shown(runner)}: is neither a name nor a runner; leave it out")
    return False


def refusing(owner: str, absent: Mapping[str, AbsentArgument]) -> Callable[[Params], Params]:
    """Decorates a dataclass: its constructor refuses absent arguments, and passes over harmless ones."""

    def decorate(cls: Params) -> Params:
        known, construct = {field.name for field in fields(cls)}, cls.__init__

        @wraps(construct)
        def checked(self: object, *values: object, **given: object) -> None:
            refuse_absent(owner, given, known, absent)
            construct(self, *values, **{name: value for name, value in given.items() if name in known})

        cls.__init__ = checked
        return cls

    return decorate


def refuse_absent(
    owner: str, given: Mapping[str, object], known: Collection[str], absent: Mapping[str, AbsentArgument]
) -> None:
    """Raises TypeError for a name that is neither known nor absent, and Unimplemented for an absent one.

    An absent argument with a harmless value passes.
    """
    for name, value in given.items():
        if name in known:
            continue
        argument = absent.get(name)
        if argument is None:
            raise TypeError(f"{owner} has no option {name!r}{closest(name, known)}")
        if not any(type(value) is type(harmless) and value == harmless for harmless in argument.harmless):
            raise Unimplemented(f"{name}={_shown(value)}: {argument.remedy}")


def _shown(value: object) -> str:
    """A value as it may stand in a message: short, and never an object's own text."""
    if isinstance(value, str):
        return repr(value[:40])
    return repr(value) if isinstance(value, (bool, int, float)) else f"<{type(value).__name__}>"
