"""Sequences as a router accepts them, for tests."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.request import hashing
from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import SamplingParams
from octavo.wire.public import sampling_bytes


def accepted_sequence(
    prompt: Sequence[int] = (1, 2), params: SamplingParams | None = None, request_id: str = "r", **changes: object
) -> NewSequence:
    """What is accepted for a prompt and its parameters; `changes` replace fields."""
    params = params or SamplingParams(seed=1, max_tokens=9)
    new = NewSequence(
        seq_id=sequence_id("", RequestId(request_id)),
        request_id=RequestId(request_id),
        body_hash=b"",
        tenant="",
        salt="",
        model="weights",
        layout="bfloat16",
        sampling=sampling_bytes(params),
        prompt=tuple(prompt),
        prompt_chain=hashing.prompt_chain(prompt),
        num_branches=params.num_branches,
        max_tokens=params.max_tokens or 9,
        priority=3,
        deadline_in_ms=0,
        keep_on_disconnect=False,
        router=Incarnation("router"),
    )
    return replace(new, **changes)  # type: ignore[arg-type]
