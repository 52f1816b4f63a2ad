"""A router under attack: how much memory it takes, and how long another client's stream pauses."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from live.cluster import ROOT, Cluster

from octavo.client import AsyncClient, SamplingParams
from octavo.net.security.api_keys import line_of, new_key

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodReport:
    """What an attack came to."""

    name: str
    did: dict[str, int]
    before_mib: float
    peak_mib: float
    gap_s: float  # the longest time between two events of the neighbour's stream
    tokens: Sequence[int]  # what the neighbour was given


def memory_mib(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB


@dataclass(frozen=True, slots=True)
class FloodKeys:
    """API keys: of the neighbour's tenant, and of the attacker's."""

    file: Path
    neighbour: str
    attacker: str

    @classmethod
    def write(cls, directory: Path) -> "FloodKeys":
        keys = cls(directory / "keys", new_key(), new_key())
        keys.file.write_text(f"{line_of('acme', keys.neighbour)}\n{line_of('mallory', keys.attacker)}\n")
        return keys


async def flooded(
    cluster: Cluster, keys: FloodKeys, name: str, seconds: float, scale: int, prompt: list[int]
) -> FloodReport:
    """Attacks router 0 for some seconds, while a client reads one stream of it, which begins before and ends after."""
    pid = cluster.processes["r0"].pid
    before, peak = memory_mib(pid), 0.0
    tokens: list[int] = []
    times: list[float] = []
    flood: asyncio.subprocess.Process | None = None
    async with AsyncClient([cluster.endpoints[0]], credentials=cluster.credentials(keys.neighbour)) as client:
        params = SamplingParams(temperature=0, max_tokens=7000)
        stream = client.generate(prompt, params)
        over = asyncio.Event()

        async def read() -> None:
            async for event in stream:
                times.append(time.monotonic())
                tokens.extend(event.token_ids)
                if over.is_set():
                    break
            await stream.aclose()

        reading = asyncio.create_task(read())
        try:
            while len(tokens) < 10:
                await asyncio.sleep(0.02)
                assert not reading.done(), "the neighbour's stream ended"
            del times[:-1]
            addresses = (cluster.endpoints[0], cluster.http_endpoints[0])
            command = [sys.executable, "-m", "floods", name, *addresses, str(seconds), str(scale)]
            support = {**os.environ, "FLOOD_KEY": keys.attacker, "PYTHONPATH": str(ROOT / "tests" / "support")}
            if cluster.certificates is not None:
                own = cluster.certificates.settings("client")
                support |= {"FLOOD_CERTIFICATE": own["tls_cert"], "FLOOD_CERTIFICATE_KEY": own["tls_key"]}
                command.append("tls")
            flood = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, cwd=ROOT, env=support, stderr=subprocess.PIPE
            )
            ending = asyncio.create_task(flood.communicate())
            while not ending.done():
                peak = max(peak, memory_mib(pid))
                await asyncio.sleep(0.1)
            said, errors = ending.result()
            assert flood.returncode == 0, errors.decode()[-2000:]
            await asyncio.sleep(0.5)
            over.set()
            await asyncio.wait_for(reading, 60)
        finally:
            reading.cancel()
            if flood is not None and flood.returncode is None:
                flood.kill()
                await flood.wait()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return FloodReport(
        name=name,
        did=json.loads(said),
        before_mib=before,
        peak_mib=peak,
        gap_s=max(gaps, default=0.0),
        tokens=tokens,
    )
