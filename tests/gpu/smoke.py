"""The extension sees the device, and one launch of each family does what it says."""

import torch
from target import target
from torch.nn import functional

from gpu_worker.ops import AttentionOptions, choose_ops, make_batch
from gpu_worker.ops.native_cuda import NativeCudaOps
from gpu_worker.ops.reference import ReferenceOps


def main() -> None:
    t = target()
    if not t.rehearsal:
        properties = torch.cuda.get_device_properties(t.device)
        t.say(
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} processors, "
            f"{properties.total_memory / 2**30:.0f} GiB, L2 {properties.L2_cache_size / 2**20:.0f} MiB; "
            f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        )
        assert choose_ops(t.device).name.startswith("native"), "the worker would not take the extension here"
    ours, theirs = NativeCudaOps(t.extension, t.device), ReferenceOps()
    torch.manual_seed(0)
    dtype = torch.bfloat16
    q_lens, kv_lens = [1, 1, 5], [40, 1, 21]
    tables = [[3, 0, 5], [1], [7, 2]]
    positions = [39, 0, 16, 17, 18, 19, 20]
    slots = [5 * 16 + 7, 16, *(2 * 16 + i for i in range(5))]
    kv = torch.randn(8, 2, 2, 16, 64, device=t.device).to(dtype)
    twin = kv.clone()
    batches = [make_batch([0] * 7, positions, slots, q_lens, kv_lens, tables, t.device) for _ in range(2)]
    keys, values = torch.randn(2, 7, 2, 64, device=t.device).to(dtype)
    queries = torch.randn(7, 8, 64, device=t.device).to(dtype)
    results = []
    for ops, cache, batch in ((ours, kv, batches[0]), (theirs, twin, batches[1])):
        ops.cache_write(cache, keys, values, batch)
        results.append(ops.paged_attention(queries, cache, batch, AttentionOptions(0.125)).float())
    assert torch.equal(kv, twin), "cache_write"
    worst = functional.l1_loss(*results).item()
    assert worst < 1e-2, f"paged_attention is off by {worst}"
    x, weight = torch.randn(5, 512, device=t.device).to(dtype), torch.ones(512, device=t.device).to(dtype)
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5), rtol=2e-2, atol=2e-2)
    arena = torch.randn(2, 8, 64, device=t.device)
    pinned = torch.zeros(2, 8, 64, pin_memory=not t.rehearsal)
    ours.swap_blocks(arena, pinned, [(1, 6), (2, 7)]).wait()
    assert torch.equal(pinned[:, 6:].to(t.device), arena[:, 1:3]), "swap_blocks"
    t.say("one launch of each family agrees with the reference")
    t.finish()


if __name__ == "__main__":
    main()
