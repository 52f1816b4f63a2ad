"""Messages as JSON: every field by its own name, numbers as numbers, enums as names."""

import json

from octavo.v1 import admin_pb2
from octavo.wire.message_json import message_json, message_values


def test_every_field_is_there_with_plain_values():
    message = admin_pb2.WatchClusterResponse(router_id="r", up_ms=2**40)
    message.workers.add(worker_id="w", role=admin_pb2.WORKER_ROLE_DECODE).load.step_ms = 1.1
    message.traffic.add(model="größe").first_token.bounds_s.extend([0.01, 0.5])
    message.sequences.add(num_tokens=[3, 4])
    found = json.loads(message_json(message))
    assert list(found) == [field.name for field in message.DESCRIPTOR.fields]
    assert (found["router_id"], found["up_ms"], found["moves"]) == ("r", 2**40, [])
    assert found["failure"] is found["queue"] is None
    [worker] = found["workers"]
    assert list(worker) == [field.name for field in admin_pb2.WorkerStatus.DESCRIPTOR.fields]
    assert (worker["worker_id"], worker["role"], worker["pid"]) == ("w", "WORKER_ROLE_DECODE", 0)
    assert worker["load"]["step_ms"] == 1.1  # a float of 32 bits is nearly that
    assert found["traffic"][0]["model"] == "größe"
    assert found["traffic"][0]["first_token"] == {"bounds_s": [0.01, 0.5], "counts": [], "total_s": 0.0}
    assert found["traffic"][0]["queued"] is None
    assert found["sequences"][0]["num_tokens"] == [3, 4]
    assert b"\n" not in message_json(message)


def test_a_number_without_a_name_is_kept():
    assert message_values(admin_pb2.WorkerStatus(role=99))["role"] == "99"
