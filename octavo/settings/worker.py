"""The settings of a worker."""

from dataclasses import dataclass
from typing import ClassVar

from octavo.process.failpoints import require_texts
from octavo.request.record import WorkerRole
from octavo.settings.common import ListenerSettings, shared, unless_empty, web_listen
from octavo.settings.options import AUTO, option
from octavo.wire.endpoint import parse_advertised, parse_endpoint, parse_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ListenerSettings):
    """The settings of a worker."""

    program = "worker"
    headings: ClassVar = {
        "listen": "where it listens, who may call, and the store",
        "model": "the model, and what it runs on",
        "block_size": "blocks and memory",
        "max_batch_tokens": "steps",
        "stream_interval": "tokens on their way out",
        "metric_aliases": "metrics, traces and logs",
    }

    listen: str = option("127.0.0.1:50061", "where routers call", check=parse_listener)
    advertise: str = option(
        "",
        "host, or host:port, that routers are told to call; empty: where it listens, or what the host's name means",
        check=unless_empty(parse_advertised),
    )
    web_listen: str = web_listen("127.0.0.1:52061")
    worker_id: str = option("", "stable name of this worker, such as its pod's; empty: made from host and port")
    tls_cert: str = shared("tls_cert")
    tls_key: str = shared("tls_key")
    tls_ca: str = shared("tls_ca")
    insecure: bool = shared("insecure")
    store: str = shared("store")
    store_replicas: int = shared("store_replicas")
    store_replica_timeout_ms: int = shared("store_replica_timeout_ms")
    model: str = shared("model")
    model_name: str = option("", "name that requests use for the model; empty: made from `model`")
    device: str = shared("device")
    dtype: str = option("auto", "data type of weights and cache", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = option(
        "auto",
        "weights on a CPU; auto: own bits of GGUF files (types without a kernel in 8) and 4- and 8-bit safetensors; "
        "none: the same, with inputs in float32; q8, q4: rounded to 8 or 4 bits; with -a8: inputs in 8 bits instead of"
        " 15. On a GPU they are decoded; kept: 4 bits and fp8 stay so there; kept-a8: and fp8 is multiplied"
        " with inputs in fp8 (no GPU has run either)",
        choices=("auto", "none", "q8", "q4", "auto-a8", "q8-a8", "q4-a8", "kept", "kept-a8"),
    )
    threads: int = option(
        0, "CPU threads of the model, of each rank; 0: one per core, which ranks share", low=0, high=1024
    )
    tensor_parallel: int = option(
        1,
        "ranks: processes that compute each layer together, on CPUs or a GPU each; 1: this one alone",
        low=1,
        high=64,
    )
    pipeline_parallel: int = option(
        1, "stages: parts of the layers, each with as many ranks as `tensor_parallel` says", low=1, high=64
    )
    launcher: str = option(
        "self",
        "where ranks are: self: on this host; torchrun: on the hosts that torchrun's variables name, each of which runs"
        " this program; ray: on nodes of a Ray cluster",
        choices=("self", "torchrun", "ray"),
    )
    hosts: int = option(0, "hosts of a group, this one included; with torchrun its WORLD_SIZE", low=0, high=64)
    host_rank: int = option(-1, "number of this host in its group; torchrun's RANK", low=-1, high=63)
    meeting_at: str = option(
        "",
        "HOST:PORT where hosts of a group meet; torchrun's MASTER_ADDR and MASTER_PORT",
        check=unless_empty(parse_endpoint),
    )
    meeting_life: int = option(0, "how often a group was started again; torchrun's TORCHELASTIC_RESTART_COUNT", low=0)
    local_world_size: int = option(1, "torchrun's processes of a host; has to be 1", low=1)
    isa: str = option(
        "auto",
        "instructions that products on a CPU use; auto: the best of the machine; a lesser one, so that all workers of a"
        " mixed fleet compute the same bits",
        choices=("auto", "generic", "avx2", "avx512", "avx512_bf16", "amx"),
    )
    packed_cache: str = option(
        "auto",
        "folder of weights that were packed for a CPU, which a later start and all workers map; auto:"
        " ~/.cache/octavo/packed; off: none",
    )
    packed_cache_bytes: int = option(16 << 30, "size of that folder, at most", size=True, low=0)
    block_size: int = option(
        16,
        "token slots of a block; more than 128 for models with recurrent layers alone, of which each block has a state",
        choices=(8, 16, 32, 64, 128, 256, 512, 1024),
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of keys and values in blocks; auto: the model's; int8: with a scale for each token and head",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    kv_cache_bytes: int = option(
        0, "memory for blocks; 0: what the largest step leaves on a GPU, up to 1 GiB on a CPU", size=True, low=0
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory for weights, steps and blocks, unless kv_cache_bytes is given", low=0.01, high=1
    )
    swap_bytes: int = option(
        AUTO,
        "host memory for blocks that are swapped out; auto: a tenth of what is available, up to 4 GiB; 0: none",
        size=True,
        auto=True,
        low=0,
    )
    watermark: float = option(
        0.01, "share of the blocks that sequences leave free when they start beside others", low=0, high=0.99
    )
    adapter_bytes: int = option(
        AUTO,
        "memory for low-rank adapters, of which those in use stay; auto: 512MiB, on a GPU at most a 64th of what blocks"
        " have; 0: none runs here",
        size=True,
        auto=True,
        low=0,
    )
    picture_cache_bytes: int = option(
        256 << 20,
        "memory for encoded pictures, of which those of sequences here stay; 0: none is taken here",
        size=True,
        low=0,
    )
    context_tokens: int = option(0, "prompt and output together, at most; 0: what the model was made for", low=0)
    generation_config: str = option(
        "auto",
        "auto: requests get the sampling that the model's generation_config.json recommends, where they say nothing",
        choices=("auto", "off"),
    )
    max_batch_tokens: int = option(
        0, "tokens one step may run; 0: 2048, fewer on a CPU that takes long for them", low=0
    )
    max_batch_sequences: int = option(64, "branches one step may run", low=1)
    cuda_graphs: str = option(
        "auto",
        "captures steps of up to 512 tokens as CUDA graphs, where there is a GPU and the model allows it; decodes:"
        " steps of decodes alone",
        choices=("auto", "decodes", "off"),
    )
    batch_invariant: bool = option(
        False, "a step gives a sequence the same bits whatever runs beside it, on a GPU as well, where it costs speed"
    )
    prefix_caching: bool = option(True, "keeps full blocks for prompts with the same prefix")
    host_tier: bool = option(True, "keeps blocks that leave the prefix cache in host memory, within swap_bytes")
    disk_tier: str = option(
        "",
        "a directory for files of the prefix cache's blocks, which outlive the worker; workers of a host may share it."
        " Empty: none",
    )
    disk_tier_bytes: int = option(16 << 30, "bytes that these files may take", size=True, low=1)
    chunked_prefill: bool = option(True, "mixes pieces of prompts with decoding; else prompts run first and whole")
    max_partial_prefills: int = option(4, "prompts that may be in pieces at once", low=1)
    max_long_partial_prefills: int = option(1, "long prompts that may be in pieces at once", low=1)
    long_prefill_threshold: int = option(0, "tokens from which a prompt is long; 0: what a step may run", low=0)
    preemption: str = option(
        "auto",
        "how a sequence gives up its blocks to another; auto: the cheaper",
        choices=("auto", "swap", "recompute"),
    )
    speculation: str = option(
        "auto",
        "guesses next tokens, which changes none of them. forced: what a constraint forces; lookup: also what the text"
        " repeats; recent: also what recent outputs of the tenant repeat; auto: recent, where a token has the same bits"
        " in a piece of any size",
        choices=("auto", "recent", "lookup", "forced", "off"),
    )
    draft_model: str = option(
        "",
        "a much smaller model of the same tokenizer, named as --model, that guesses where nothing repeats; on CPUs",
    )
    policy: str = option("fcfs", "which sequence runs first", choices=("fcfs", "priority"))
    stream_interval: int = option(1, "steps whose tokens are sent together; first ones and ends go at once", low=1)
    append_tokens: int = option(
        4, "tokens of a stream that gather for the journal, in steps of many branches; 1: none wait", low=1
    )
    append_delay_ms: int = option(50, "how long a token waits for others, at most", low=0)
    append_branches: int = option(32, "branches in a step from which tokens gather", low=1)
    journal: str = option(
        "strict",
        "strict: a token is delivered once the journal has it; off: at once, for benchmarks only",
        choices=("strict", "off"),
    )
    lease_ms: int = option(3000, "how long the store believes this worker alive after its last step", low=100)
    drain_ms: int = option(25_000, "how long it may take to give its sequences to others after SIGTERM", low=0)
    role: str = option(
        WorkerRole.BOTH,
        "what it is for: prompts, whose sequences move to others after their first tokens, outputs, or both",
        choices=tuple(WorkerRole),
    )
    move_limit: int = option(4, "sequences that move to other workers with their blocks at once; 0: none do", low=0)
    move_mbytes_per_s: int = option(
        0, "megabytes of blocks sent per second at most; 0: only what others who decode leave over", low=0
    )
    prefix_fetch: bool = option(True, "gets blocks of a prompt from another worker that has them, where that is faster")
    warm_up_ms: int = option(
        10_000, "how long it may fetch the prefixes that other workers use, before it serves; 0: not at all", low=0
    )
    standby: bool = option(
        False,
        "another worker gets the blocks of long sequences while they run here, and goes on from them if this one dies;"
        " it keeps such blocks for others, too",
    )
    standby_tokens: int = option(1024, "prompt and output from which a sequence is long", low=1)
    metric_aliases: str = shared("metric_aliases")
    traces_endpoint: str = shared("traces_endpoint")
    traces_share: float = shared("traces_share")
    log_format: str = shared("log_format")
    log_level: str = shared("log_level")

    # For tests: runners without a model, from gpu_worker.testing, and places to fail at, from process.failpoints.
    runner: str = option("model", "what computes tokens", choices=("model", "fake", "witness"), hidden=True)
    numerics: str = option("", "the class of numerics that such a runner says it has", hidden=True)
    step_delay_ms: float = option(0.0, "how much longer a step takes", low=0, high=60_000, hidden=True)
    die_on_token: int = option(-1, "a token at which the fake runner kills its process", low=-1, hidden=True)
    failpoints: tuple[str, ...] = option(
        (), "places at which the worker fails, as name=action", check=require_texts, hidden=True
    )
