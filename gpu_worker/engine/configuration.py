"""Which runner (with or without a model) and which configuration of the scheduler a worker's settings mean."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, cast

from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import Runner, RunnerInfo
from octavo.process.loop import StopRequest
from octavo.process.machine import WITHOUT_GPU, missing_gpu, usable_cores
from octavo.request.errors import InvalidArgument, ServingError
from octavo.settings.options import AUTO
from octavo.settings.worker import WorkerSettings
from octavo.text.tokenizers.tokenizer import Tokenizer, open_tokenizer

BATCH_TOKENS = 2048
DRAFT_CACHE_BYTES = 256 << 20  # for the blocks of a draft model
LOOKUPS = ("lookup", "recent")  # values of speculation with which a draft model is asked
STEPS_PER_LEASE = 12  # on a CPU: a step is short against the lease, and does not delay the decodes in it for long


def build_runner(settings: WorkerSettings) -> Runner:
    """The runner that the settings name. A model takes its time to load; only a model imports torch."""
    without_model: dict[str, Any] = {
        "step_s": settings.step_delay_ms / 1000,
        "block_size": settings.block_size,
        "kv_cache_bytes": settings.kv_cache_bytes,
        "numerics": settings.numerics,
    }
    if num_ranks(settings) > 1 and settings.runner != "model":
        raise InvalidArgument("tensor_parallel", f"the {settings.runner} runner has no ranks: leave it out")
    if num_ranks(settings) == 1 and settings.launcher != "self":
        raise InvalidArgument("launcher", f"{settings.launcher}: one rank needs no hosts: give --tensor-parallel")
    if settings.runner == "fake":
        from gpu_worker.testing.fake_runner import FakeRunner

        return FakeRunner(die_on_token=settings.die_on_token, **without_model)
    if settings.runner == "witness":
        from gpu_worker.testing.witness_runner import WitnessRunner

        return WitnessRunner(**without_model)
    from gpu_worker.running.loading import load_runner
    from gpu_worker.running.sizing import choose_device

    device = str(choose_device(settings.device))
    load: Callable[..., Runner] = load_runner
    if num_ranks(settings) > 1:
        from gpu_worker.group.hosts.launchers import streams_of
        from gpu_worker.group.loading import load_group

        load = partial(
            load_group,
            ranks=settings.tensor_parallel,
            stages=settings.pipeline_parallel,
            streams=streams_of(settings),
            patience_s=settings.lease_ms / 1000,
        )
    return load(
        settings.model,
        name=settings.model_name or None,
        device=device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        threads=threads_of_rank(settings),
        isa=settings.isa,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        swap_bytes=None if settings.swap_bytes == AUTO else settings.swap_bytes,
        adapter_bytes=None if settings.adapter_bytes == AUTO else settings.adapter_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_batch_tokens=batch_tokens(settings),
        max_batch_sequences=settings.max_batch_sequences,
        cuda_graphs=settings.cuda_graphs,
        batch_invariant=settings.batch_invariant,
        context_tokens=settings.context_tokens or None,
        generation_config=settings.generation_config,
        packed_cache=settings.packed_cache,
        packed_cache_bytes=settings.packed_cache_bytes,
    )


def refuse_missing_gpu(settings: WorkerSettings) -> None:
    """InvalidArgument where the settings ask for a GPU that is not here. It needs no torch, which takes seconds."""
    if settings.runner == "model" and (missing := missing_gpu(settings.device)):
        raise InvalidArgument("device", f"{settings.device}: {missing}: {WITHOUT_GPU}")


def followed_host(settings: WorkerSettings) -> Callable[[StopRequest], Awaitable[int]] | None:
    """What a process runs that has the ranks of a host other than the front's; None for all others.

    Raises InvalidArgument where nothing says which host this is.
    """
    if settings.launcher != "torchrun":
        return None
    from gpu_worker.group.hosts.follower import follow
    from gpu_worker.group.hosts.launchers import is_follower

    return partial(follow, settings) if is_follower(settings) else None


def adapter_bytes(settings: WorkerSettings, info: RunnerInfo) -> int:
    """The memory that low-rank adapters may take."""
    return info.adapter_bytes if settings.adapter_bytes == AUTO else settings.adapter_bytes


def build_draft_model(settings: WorkerSettings, info: RunnerInfo) -> DraftModel | None:
    """The model that guesses for the one of `info`; None if the settings name none. Loading it takes its time.

    Raises InvalidArgument where it cannot guess: for another tokenizer, not on a CPU, or where nothing is guessed.
    """
    if not settings.draft_model:
        return None
    if info.device != "cpu" or settings.runner != "model":
        raise InvalidArgument("draft_model", f"guesses for models on a CPU alone, not on {info.device}: leave it out")
    if (mode := speculation(settings, info)) not in LOOKUPS:
        raise InvalidArgument(
            "draft_model", f"speculation is {mode} here: leave draft_model out, or say speculation recent"
        )
    from gpu_worker.running.loading import load_runner

    try:
        runner = load_runner(
            settings.draft_model,
            dtype=settings.dtype,
            threads=threads_of_rank(settings),
            kv_cache_bytes=DRAFT_CACHE_BYTES,
            swap_bytes=0,
        )
    except ServingError as error:  # it would sound as if it were about the served model
        raise InvalidArgument("draft_model", error.message) from error
    if info.encoder.exists or runner.info.encoder.exists:
        what = "models with an encoder are neither guessed for nor guess themselves: leave it out"
        raise InvalidArgument("draft_model", what)
    if runner.info.keeps_state:
        message = f"{settings.draft_model} has recurrent layers, whose state cannot go back: give a model without them"
        raise InvalidArgument("draft_model", message)
    if not same_tokens(info.tokenizer, runner.info.tokenizer):
        message = f"{settings.draft_model} has another tokenizer than {info.model}: give a model with the same tokens"
        raise InvalidArgument("draft_model", message)
    return DraftModel(runner, info.vocab_size)


def same_tokens(first: str, second: str) -> bool:
    """Whether two tokenizers, as `open_tokenizer` names them, have the same tokens under the same ids."""
    if first == second:
        return True
    one, other = open_tokenizer(first), open_tokenizer(second)
    return isinstance(one, Tokenizer) and isinstance(other, Tokenizer) and one.tokens == other.tokens


def threads_of_rank(settings: WorkerSettings) -> int:
    """How many threads this process computes with; 0: one per core. All models in it have the same ones."""
    ranks = num_ranks(settings)
    if settings.launcher != "self":  # each rank has its share of the cores of its own host
        ranks = -(-ranks // num_hosts(settings))
        return settings.threads or max(1, usable_cores() // ranks)
    return settings.threads or (max(1, usable_cores() // ranks) if ranks > 1 else 0)


def num_ranks(settings: WorkerSettings) -> int:
    return settings.tensor_parallel * settings.pipeline_parallel


def num_hosts(settings: WorkerSettings) -> int:
    """Of the group that the settings mean."""
    if settings.launcher == "self":
        return 1
    return max(1, settings.hosts)


def batch_tokens(settings: WorkerSettings) -> int:
    """How many tokens a step may run at most."""
    return settings.max_batch_tokens or max(BATCH_TOKENS, settings.max_batch_sequences)


def step_s(settings: WorkerSettings, info: RunnerInfo) -> float:
    """How long a step with prompts should take. 0: there is no such target, and the step's budget is fixed."""
    budget_follows_rate = info.device == "cpu" and settings.runner == "model" and not settings.max_batch_tokens
    return settings.lease_ms / 1000 / STEPS_PER_LEASE if budget_follows_rate else 0.0


def speculation(settings: WorkerSettings, info: RunnerInfo) -> Literal["off", "forced", "lookup", "recent"]:
    """Which drafts steps may have. With `auto` only those that can change no token, even of two nearly equal ones.

    Raises InvalidArgument for a model whose state has gone on past a guess that turns out to be wrong.
    """
    chosen = settings.speculation
    if info.keeps_state and chosen not in ("auto", "off"):
        raise InvalidArgument(
            "speculation",
            f"{info.model} has recurrent layers, whose state cannot go back behind a wrong guess: say off",
        )
    if chosen == "auto":
        chosen = "recent" if info.piece_invariant and not info.keeps_state else "off"
    return cast("Literal['off', 'forced', 'lookup', 'recent']", chosen)


def scheduler_config(settings: WorkerSettings, info: RunnerInfo) -> SchedulerConfig:
    max_batch_tokens = batch_tokens(settings)
    return SchedulerConfig(
        max_batch_tokens=max_batch_tokens,
        step_s=step_s(settings, info),
        max_batch_sequences=min(settings.max_batch_sequences, max_batch_tokens),
        max_partial_prefills=settings.max_partial_prefills,
        max_long_partial_prefills=settings.max_long_partial_prefills,
        long_prefill_threshold=settings.long_prefill_threshold,
        chunked_prefill=settings.chunked_prefill,
        prefix_caching=settings.prefix_caching,
        host_tier=settings.host_tier,
        watermark=settings.watermark,
        speculation=speculation(settings, info),
        policy=cast("Literal['fcfs', 'priority']", settings.policy),
        preemption=cast("Literal['auto', 'swap', 'recompute']", settings.preemption),
    )
