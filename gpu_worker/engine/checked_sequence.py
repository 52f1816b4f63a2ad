"""From an admission to the sequence that the scheduler is to have."""

import time

from gpu_worker.scheduling.state.sequence import Sequence
from gpu_worker.steps.runner import RunnerInfo
from octavo.request import hashing, validation
from octavo.request.record import Admission


def checked_sequence(admission: Admission, info: RunnerInfo) -> Sequence:
    """Raises InvalidArgument with the field that is wrong."""
    validation.validate_admission(
        admission,
        vocab_size=info.vocab_size,
        context_tokens=info.context_tokens,
        eos_token_ids=info.eos_token_ids,
    )
    root = hashing.root_key(info.fingerprint, info.layout, salt=admission.salt, numerics=info.numerics)
    return Sequence.from_admission(admission, root=root, now=time.monotonic())
