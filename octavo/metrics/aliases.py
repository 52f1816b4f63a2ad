"""The metrics that gateways and endpoint pickers read of a model server, under the names that vLLM gives them.

Names, labels and meanings are those of the Gateway API's inference extension. octavo tells them beside its own where
`--metric-aliases vllm` says so; nothing of octavo's own reads them.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.metrics.table import BOTH, Metric, MetricKind
from octavo.metrics.value import MetricValue
from octavo.request.limits import MAX_ADAPTERS

VLLM = "vllm"
MAX_LISTED = 64  # adapters in one value


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"{VLLM}:{name}", MetricKind.GAUGE, BOTH, help, labels)


_ALL = (
    _gauge("num_requests_waiting", "Requests that wait: of a router, its streams without a worker.", "model_name"),
    _gauge("num_requests_running", "Requests that run: of a router, its streams with a worker.", "model_name"),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the blocks that sequences hold, 0 to 1: of a router, of all workers that it knows.",
        "model_name",
    ),
    _gauge("gpu_cache_usage_perc", "The same, under the name that it had before.", "model_name"),
    _gauge("cache_config_info", "Always 1. The size of blocks and their number.", "block_size", "num_gpu_blocks"),
    _gauge(
        "lora_requests_info",
        "When this was told. Adapters by names, or by digests of a worker; max_lora: how many may have names.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    ),
)
ALIASES: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """What a program knows of the load of one model."""

    model: str
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    block_size: int


def alias_values(
    loads: list[ModelLoad], running: Iterable[str] = (), waiting: Iterable[str] = ()
) -> Iterator[MetricValue]:
    """The values of a program with these models, and with requests that run or wait with these adapters."""
    for load in loads:
        usage = load.num_used_blocks / load.num_blocks if load.num_blocks else 0.0
        yield MetricValue("vllm:num_requests_waiting", load.num_waiting, (load.model,))
        yield MetricValue("vllm:num_requests_running", load.num_running, (load.model,))
        yield MetricValue("vllm:kv_cache_usage_perc", usage, (load.model,))
        yield MetricValue("vllm:gpu_cache_usage_perc", usage, (load.model,))
    sizes: dict[int, int] = {}
    for load in loads:
        sizes[load.block_size] = sizes.get(load.block_size, 0) + load.num_blocks
    for block_size, num_blocks in sizes.items():
        yield MetricValue("vllm:cache_config_info", 1, (str(block_size), str(num_blocks)))
    yield MetricValue("vllm:lora_requests_info", time.time(), (str(MAX_ADAPTERS), _listed(running), _listed(waiting)))


def _listed(adapters: Iterable[str]) -> str:
    return ",".join(sorted(set(adapters))[:MAX_LISTED])
