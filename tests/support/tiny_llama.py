"""A small Llama of random weights under the real scheduler, on any device and any ops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scheduler_parts import SchedulerParts
from sequences import new_sequence
from torch import Tensor

from gpu_worker.models.decoders.config import LlamaConfig
from gpu_worker.models.decoders.llama import LlamaDecoder
from gpu_worker.models.decoders.rope import RopeParameters
from gpu_worker.ops import Ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.graphs import Capturer, capture_graphs
from gpu_worker.running.memory.arena import KvArena
from gpu_worker.running.model_runner import ModelRunner
from gpu_worker.sampling.sampler import Sampler
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import RunnerInfo
from gpu_worker.steps.seats import Seat
from gpu_worker.steps.step_input import StepInput
from octavo.pooling.params import ModelPooling
from octavo.request.sampling import SamplingParams

CPU = torch.device("cpu")
PROMPTS = [[(i * 37 + j * 11) % 96 for j in range(length)] for i, length in enumerate((21, 1, 8, 40, 16, 33))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The sizes of the model and its blocks."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 32
    inner: int = 48
    vocab: int = 96
    context: int = 256
    window: int = 0  # of every other layer
    block_size: int = 8
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            context_tokens=self.context,
            norm_eps=1e-5,
            rope=RopeParameters(dim=self.head_dim),
            windows=tuple(self.window if layer % 2 else 0 for layer in range(self.layers)),
            sparse=(None,) * self.layers,
            rotated=(True,) * self.layers,
            tied=True,
        )

    @property
    def blocks(self) -> KvShape:
        return KvShape(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            block_size=self.block_size,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    def weights(self, device: torch.device = CPU) -> dict[str, Tensor]:
        """Large ones, so that the likeliest token is far from the next. A device's differ from those of a CPU."""
        generator = torch.Generator(device).manual_seed(3)

        def matrix(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device) * 2 / shape[1] ** 0.5).to(self.dtype)

        tensors = {"embedding": matrix(self.vocab, self.hidden) * 4, "norm": torch.ones(self.hidden, dtype=self.dtype)}
        for layer in range(self.layers):
            tensors |= {
                f"{layer}.input_norm": torch.ones(self.hidden, dtype=self.dtype),
                f"{layer}.mlp_norm": torch.ones(self.hidden, dtype=self.dtype),
                f"{layer}.qkv": matrix((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
                f"{layer}.out": matrix(self.hidden, self.heads * self.head_dim),
                f"{layer}.gate_up": matrix(2 * self.inner, self.hidden),
                f"{layer}.down": matrix(self.hidden, self.inner),
            }
        return tensors


@dataclass(slots=True, kw_only=True)
class Tiny:
    """A runner, and what it is made of."""

    runner: ModelRunner
    decoder: LlamaDecoder
    arena: KvArena


def tiny_llama(
    form: Form,
    ops: Ops,
    device: torch.device = CPU,
    capture: Capturer | None = None,
    num_blocks: int = 64,
    max_sequences: int = 16,
    num_host_blocks: int | None = None,
    weights: dict[str, Tensor] | None = None,
    *,
    staged: bool = False,
    mixed_tokens: int = 0,
) -> Tiny:
    """A runner with a tiny model, with graphs if `capture` is given. As many host blocks as blocks, unless told.

    `mixed_tokens`: mixed steps of up to so many tokens are captured, too.
    `staged`: on a CPU, too, its blocks go to other workers by way of a staging area.
    """
    num_host_blocks = num_blocks if num_host_blocks is None else num_host_blocks
    decoder = LlamaDecoder(form.config, form.weights() if weights is None else weights, ops, device)
    arena = KvArena(form.blocks, num_blocks, num_host_blocks, device, ops)
    info = RunnerInfo(
        model="tiny",
        fingerprint="tiny",
        layout=form.blocks.layout,
        kv_dtype=form.blocks.dtype_name,
        device=str(device),
        vocab_size=form.vocab,
        context_tokens=min(form.context, num_blocks * form.block_size),
        eos_token_ids=(),
        block_size=form.block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        bytes_per_block=form.blocks.bytes_per_block,
        tokenizer="",
        pooling=ModelPooling(form.hidden),
    )
    graphs = []
    if capture is not None:
        sizes = max_sequences, info.context_tokens
        graphs = capture_graphs(decoder, arena.layers, ops, *sizes, device, capture, mixed_tokens)
        assert len(graphs) == 1 + bool(mixed_tokens)
    runner = ModelRunner(info, decoder, arena, Sampler(form.vocab, device), device, graphs, staged=staged)
    return Tiny(runner=runner, decoder=decoder, arena=arena)


def request(number: int, prompt: list[int], **params: object) -> Sequence:
    options = {"temperature": 0.0, "max_tokens": 24, "seed": number, "ignore_eos": True, **params}
    return new_sequence(f"{number:032x}", prompt, SamplingParams(**options))  # type: ignore[arg-type]


def requests(**params: object) -> list[Sequence]:
    return [request(number, prompt, **params) for number, prompt in enumerate(PROMPTS)]


def drive(
    runner: ModelRunner,
    sequences: list[Sequence],
    watch: Callable[[StepInput], None] = lambda step: None,
    **config: object,
) -> tuple[list[list[int]], Workload]:
    """The outputs of all branches, through the scheduler, and its workload. `watch` sees each step."""
    options = {
        "max_batch_tokens": 64,
        "max_batch_sequences": 16,
        "min_preempt_interval_s": 0.0,
        "debug": True,
        **config,
    }
    parts = SchedulerParts(SchedulerConfig(**options), runner.info)  # type: ignore[arg-type]
    scheduler = parts.scheduler
    outputs: dict[tuple[str, int], list[int]] = {}
    for sequence in sequences:
        assert scheduler.admit(sequence).admitted
    for _ in range(2000):
        if not scheduler.has_work:
            runner._block_mover.wait_for_copies()  # of demoted blocks, into an arena that the caller may drop
            return [outputs[key] for key in sorted(outputs)], parts.workload
        plan = scheduler.plan()
        watch(plan.input)
        for item in scheduler.commit(plan, runner.run(plan.input)).items:
            assert not item.failure, f"failed: {item.failure}"
            outputs.setdefault((item.seq_id, item.branch), []).extend(item.token_ids)
    raise AssertionError("the scheduler does not come to an end")


def logits_of(tiny: Tiny, step: StepInput) -> Tensor:
    """The logits of a step that the sampler is given."""
    seen = []
    sample = tiny.runner._sampler.sample

    def watched(logits: Tensor, rows: list[int], branches: list[Seat]) -> object:
        seen.append(logits)
        return sample(logits, rows, branches)

    tiny.runner._sampler.sample = watched  # type: ignore[method-assign, assignment]
    try:
        tiny.runner.run(step)
    finally:
        tiny.runner._sampler.sample = sample  # type: ignore[method-assign]
    return seen[0]
