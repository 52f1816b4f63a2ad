"""Events of stored responses, for a comparison of two of them."""

import json
from typing import Any


def without_names(events: list[dict[str, Any]]) -> str:
    """The events without the ids of the response and its items, and without its time."""
    text = json.dumps(events)
    response = events[0]["response"]
    items = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    for number, name in enumerate([response["id"], *items]):
        text = text.replace(name, f"name {number}")
    return text.replace(f'"created_at": {response["created_at"]}', '"created_at": 0')
