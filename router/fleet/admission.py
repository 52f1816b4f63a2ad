"""What a worker is asked to run, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from octavo import wire
from octavo.ids import SequenceId
from octavo.sampling import SamplingParams
from octavo.v1 import types_pb2, worker_pb2


class Outcome(Enum):
    """A worker's answer to an admission."""

    ADMITTED = worker_pb2.ADMISSION_OUTCOME_ADMITTED
    LATER = worker_pb2.ADMISSION_OUTCOME_LATER
    NEVER = worker_pb2.ADMISSION_OUTCOME_NEVER
    REJECTED = worker_pb2.ADMISSION_OUTCOME_REJECTED
    STALE_EPOCH = worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a worker is asked to run; see worker.proto."""

    seq_id: SequenceId
    epoch: int
    prompt: Sequence[int]
    outputs: Sequence[Sequence[int]]
    finished_branches: Sequence[int]
    sampling: SamplingParams
    salt: str
    priority: int
    deadline_in_ms: int
    alone: bool


def admission_to_wire(admission: Admission) -> worker_pb2.Admission:
    return worker_pb2.Admission(
        seq_id=admission.seq_id,
        epoch=admission.epoch,
        prompt=types_pb2.TokenIds(ids=admission.prompt),
        outputs=[types_pb2.TokenIds(ids=output) for output in admission.outputs],
        finished_branches=admission.finished_branches,
        sampling=wire.sampling_to_wire(admission.sampling),
        salt=admission.salt,
        priority=admission.priority,
        deadline_in_ms=admission.deadline_in_ms,
        alone=admission.alone,
    )
