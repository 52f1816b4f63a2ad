"""What the device's memory gives: the ceilings that the tables are shares of."""

import torch
from target import Target, target
from timing import medians


def copy_bandwidth(t: Target) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = t.pick(2 << 30, 1 << 16)
    source = torch.empty(size, dtype=torch.uint8, device=t.device).random_()
    there = torch.empty_like(source)
    return 2 * size / medians(t, {"copy": lambda i: there.copy_(source)}, 1)["copy"]


def read_bandwidth(t: Target) -> float:
    """Bytes per second of a large sum."""
    source = torch.empty(t.pick(1 << 30, 1 << 14), dtype=torch.float32, device=t.device).normal_()
    out = torch.empty((), dtype=torch.float32, device=t.device)
    return source.numel() * 4 / medians(t, {"read": lambda i: torch.sum(source, 0, out=out)}, 1)["read"]


def host_bandwidth(t: Target) -> tuple[float, float]:
    """Bytes per second of one large copy to pinned memory, and from it."""
    there = torch.empty(t.pick(1 << 30, 1 << 16), dtype=torch.uint8, device=t.device)
    here = torch.empty(there.shape, dtype=torch.uint8, pin_memory=not t.rehearsal)
    calls = {
        "out": lambda i: here.copy_(there, non_blocking=True),
        "in": lambda i: there.copy_(here, non_blocking=True),
    }
    times = medians(t, calls, 1, 7, captured=False)
    return there.numel() / times["out"], there.numel() / times["in"]


def main() -> None:
    t = target()
    out, into = host_bandwidth(t)
    rows = [
        ("device to device, read and written", f"{copy_bandwidth(t) / 1e9:.0f}"),
        ("read alone (torch.sum)", f"{read_bandwidth(t) / 1e9:.0f}"),
        ("device to pinned host memory", f"{out / 1e9:.1f}"),
        ("pinned host memory to device", f"{into / 1e9:.1f}"),
    ]
    t.table("Bandwidth", ("copy", "GB/s"), rows)
    t.finish()


if __name__ == "__main__":
    main()
