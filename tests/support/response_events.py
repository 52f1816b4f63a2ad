"""Events of streams whose events have names, and stored responses without what differs between two of them."""

import json
from typing import Any


def named_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each with the name that stands before it."""
    found = []
    for event in filter(None, body.decode().split("\n\n")):
        name, data = event.split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        if name != f"event: {found[-1]['type']}":
            raise AssertionError(event)
    return found


def without_names(events: list[dict[str, Any]]) -> str:
    """The events without the ids of the response and its items, and without its time."""
    text = json.dumps(events)
    response = events[0]["response"]
    items = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    for number, name in enumerate([response["id"], *items]):
        text = text.replace(name, f"name {number}")
    return text.replace(f'"created_at": {response["created_at"]}', '"created_at": 0')
