"""JSON over HTTP to a router of a live cluster, as any program sends it."""

import json
import urllib.error
import urllib.request
from typing import Any

from live.cluster import Cluster


def post_json(cluster: Cluster, path: str, body: object, timeout_s: float = 60.0) -> tuple[int, Any]:
    """The status and the answer, also of a refusal."""
    url = f"http://{cluster.http_endpoints[0]}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
