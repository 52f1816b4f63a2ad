"""What a program answers over HTTP to those who watch it."""

import asyncio
import http.client
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    text: str


def get(endpoint: str, path: str, method: str = "GET") -> Answer:
    """The answer to one request at HOST:PORT."""
    connection = http.client.HTTPConnection(endpoint, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return Answer(answer.status, answer.getheader("content-type", ""), answer.read().decode())
    finally:
        connection.close()


def samples_in(text: str) -> dict[str, float]:
    """The values by name and labels, as in octavo_blocks{state=free}."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def metrics(endpoint: str) -> dict[str, float]:
    """What /metrics at HOST:PORT says now."""
    answer = await asyncio.to_thread(get, endpoint, "/metrics")
    if answer.status != 200:
        raise AssertionError(f"{endpoint}/metrics: {answer.status} {answer.text}")
    return samples_in(answer.text)
