"""Blocks that leave a device: sequences and prefixes move between two runners on it, over a connection for blocks."""

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from target import Target, target  # first: it says where the others lie

# isort: split
from connected_bench import BlockLink, ConnectedBench
from late_copier import check_buffers
from migration_benches import copy_blocks
from model import capture
from steps import decodes
from tiny_llama import PROMPTS, Form, tiny_llama

from gpu_worker.ops import Ops
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.running.memory.arena import StepMark, staged_blocks
from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingSize
from octavo.request.hashing import block_hashes
from octavo.request.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


SIMULATOR = threading.Lock()


class OneAtATime:
    """The simulator, for several threads: of all its swaps one call runs at a time."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def __getattr__(self, name: str) -> Any:
        return self._new_swapper if name == "Swapper" else getattr(self._extension, name)

    def _new_swapper(self) -> Any:
        swapper = self._extension.Swapper()

        def locked(call: str, *args: Any) -> Any:
            with SIMULATOR:
                return getattr(swapper, call)(*args)

        return SimpleNamespace(**{call: partial(locked, call) for call in ("start", "done", "wait", "let_wait")})


def ops(t: Target) -> Ops:
    extension: Any = OneAtATime(t.extension) if t.rehearsal else t.extension
    return NativeCudaOps(extension, t.device)


def bench(t: Target, form: Form) -> ConnectedBench:
    """Steps run while blocks travel; not in a rehearsal, since the simulator runs one kernel at a time."""
    graphs = None if t.rehearsal else capture(t)
    made = tiny_llama(form, ops(t), t.device, graphs, num_blocks=t.pick(400, 96), num_host_blocks=8, staged=True)
    return ConnectedBench(runner=made.runner, goes_on=not t.rehearsal, max_batch_tokens=64)


def sequences_move(t: Target, form: Form) -> None:
    """Away, and back: the tokens of a run without a move, and each block has the bytes that it had."""
    prompts = {f"s{number}": prompt for number, prompt in enumerate(PROMPTS[: t.pick(6, 3)])}
    alone, *sides = (bench(t, form) for _ in range(3))
    for name, prompt in prompts.items():
        alone.admit(name, prompt, GREEDY)
        sides[0].admit(name, prompt, GREEDY)
    alone.finish()
    sides[1].admit("other", list(range(1, 30)), GREEDY)
    for side in sides:
        side.run_steps(t.pick(12, 9))
    moving, slowest = list(prompts)[: t.pick(3, 1)], 0.0
    for source, to in (sides, sides[::-1]):
        for name in moving:
            slowest = max(slowest, clock(lambda s=source, d=to, n=name: s.move_to(d, n, between=[s.step])))
            to.step()
            assert to.lengths[name] == 1, f"{form}: {name} was computed again"
    for side in sides:
        side.finish()
    equal = sum(sides[0].tokens[f"{name}.0"] == alone.tokens[f"{name}.0"] for name in prompts)
    # In 16 bits the next token may hang on which sequences share a batch.
    assert equal == len(prompts) or form.dtype != torch.float32, f"{form}: {equal} of {len(prompts)} are the same"
    sent, meanwhile = (sum(getattr(side, what) for side in sides) for what in ("num_sent", "num_steps_meanwhile"))
    for side in sides:
        memory = side.runner.block_memory
        check_buffers(memory, StagingSize.of(memory.bytes_per_block))
        side.close()
    t.say(
        f"{form.dtype}: {2 * len(moving)} moves between two runners on {t.device}, {sent} blocks, {meanwhile} steps "
        f"meanwhile: {equal} of {len(prompts)} outputs are those of a run without a move, and each block has the bytes "
        f"that it had; the slowest move took {1e3 * slowest:.0f} ms"
    )


def a_prefix_is_fetched(t: Target, form: Form) -> None:
    """The second runner computes the end of the prompt alone, and goes on as the first one did."""
    owner, other = bench(t, form), bench(t, form)
    prompt = [(7 * i + 3) % 96 for i in range(10 * form.block_size + 3)]
    owner.admit("first", prompt, GREEDY)
    owner.finish()
    sequence = other.new("again", prompt, GREEDY)
    held = other.exchange.hold([block_hashes(sequence.root, prompt[:-1], form.block_size)])
    copy_blocks(owner, other, held)
    other.exchange.release(held)
    assert other.scheduler.admit(sequence).admitted
    other.step()
    assert other.lengths["again"] == 3, "the prefix was computed again"
    other.finish()
    assert other.tokens["again.0"] == owner.tokens["first.0"] or form.dtype != torch.float32
    for side in (owner, other):
        side.close()
    t.say(f"{form.dtype}: a prefix of {len(held.wanted)} blocks was fetched and not computed")


def staged(t: Target, shape: KvShape, num_blocks: int) -> StagedBlocks:
    arena = shape.allocate_arena(num_blocks, t.device)
    arena.view(torch.uint8).random_()
    t.wait()
    return staged_blocks(ops(t), arena, StepMark(t.device))


def rates(t: Target) -> None:
    """Copies by themselves, and blocks over a connection of this machine."""
    forms = [("2 MiB: 32 layers, 8 heads of 128", 32, 8, 128), ("368 kB: 30 layers, 3 heads of 64", 30, 3, 64)]
    rows = []
    for name, layers, heads, dim in t.pick(forms, [("tiny", 2, 1, 32)]):
        shape = KvShape(num_layers=layers, num_kv_heads=heads, block_size=16, head_dim=dim, dtype=torch.bfloat16)
        rows.append((name, *(f"{rate / 1e9:.2f}" for rate in rates_of(t, shape))))
    head = ("block", "copies out, GB/s", "copies in, one by one, GB/s", "over a connection, GB/s")
    t.table("Blocks by way of a staging area, 16 tokens, bfloat16", head, rows)


def rates_of(t: Target, shape: KvShape) -> list[float]:
    """Bytes per second: out, in, and from one memory to another over a connection."""
    count = t.pick((512 << 20) // shape.bytes_per_block, 8)
    source, into = staged(t, shape, count), staged(t, shape, count)
    link = BlockLink(source, into)
    places = [(block, count - 1 - block) for block in range(count)]
    link.send(places[:4]).wait()  # sets up what is set up at first use
    seconds = [clock(lambda: read_all(source, count)), clock(lambda: write_all(into, count))]
    seconds.append(min(clock(lambda: link.send(places).wait()) for _ in range(t.pick(3, 1))))
    link.close()
    return [count * shape.bytes_per_block / each for each in seconds]


def clock(run: Any) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def read_all(memory: StagedBlocks, count: int) -> None:
    for start in range(0, count, memory.blocks_per_turn):
        with memory.read_blocks(range(start, min(count, start + memory.blocks_per_turn))) as contents:
            for _ in contents:
                pass


def write_all(memory: StagedBlocks, count: int) -> None:
    for block in range(count):
        memory.open_block(block)
        memory.keep_block(block)
        memory.close_block(block)


def steps_beside(t: Target) -> None:
    """What decoding loses while another thread sends its blocks and receives others."""
    sizes = {"layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "hidden": 2048, "inner": 8192}
    full = Form(**sizes, vocab=128256, context=4096, block_size=16, dtype=torch.bfloat16)
    form = t.pick(full, Form(head_dim=32))
    blocks, batch = t.pick((2400, 16), (40, 2))
    graphs = None if t.rehearsal else capture(t)
    made = {"num_blocks": blocks, "num_host_blocks": 1, "max_sequences": batch, "weights": form.weights(t.device)}
    runner = tiny_llama(form, ops(t), t.device, graphs, staged=True, **made).runner
    other = staged(t, form.blocks, blocks)
    step = decodes([t.pick(1024, 9)] * batch, np.random.default_rng(0), form.block_size, t.pick(blocks // 2, blocks))
    links = BlockLink(runner.block_memory, other), BlockLink(other, runner.block_memory)
    half = [(block, block) for block in range(blocks // 2, blocks)]  # no step uses these

    def median(count: int, beside: bool) -> float:
        times, deliveries = [], []
        for _ in range(count):
            if beside and not any(each.under_way for each in deliveries):
                for each in deliveries:
                    each.wait()
                deliveries = [link.send(half) for link in links]
            times.append(clock(lambda: runner.run(step)))
        for each in deliveries:
            each.wait()
        return sorted(times)[count // 2]

    if t.rehearsal:  # one kernel at a time
        for link in links:
            link.send(half[:4]).wait()
    median(t.pick(20, 1), False)
    quiet, busy = median(t.pick(60, 1), False), median(t.pick(60, 1), not t.rehearsal)
    for link in links:
        link.close()
    t.table(
        f"A decode step of {batch} sequences, 1.2 G random weights, while blocks leave and come",
        ("alone, ms", "beside, ms"),
        [(f"{quiet * 1e3:.2f}", f"{busy * 1e3:.2f}")],
    )


def main() -> None:
    t = target()
    torch.manual_seed(0)
    if not t.rehearsal:
        torch.backends.cuda.matmul.allow_tf32 = False
    for form in (Form(window=27), Form(head_dim=64, block_size=16, dtype=torch.bfloat16))[: t.pick(2, 1)]:
        sequences_move(t, form)
        a_prefix_is_fetched(t, form)
    rates(t)
    steps_beside(t)
    t.finish()


if __name__ == "__main__":
    main()
