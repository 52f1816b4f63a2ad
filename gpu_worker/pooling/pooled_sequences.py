"""Makes the sequence of a prompt whose vector is wanted: it has no output, no record and no journal."""

import secrets
import time
from collections.abc import Callable, Sequence

from gpu_worker.scheduling.state.pooling import Pooling, PoolingEnd
from gpu_worker.scheduling.state.sequence import Sequence as ScheduledSequence
from gpu_worker.steps.runner import RunnerInfo
from octavo.pooling.params import PoolingParams, PoolKind
from octavo.request import hashing, sampling_validation, validation
from octavo.request.errors import InvalidArgument, Unimplemented
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams

NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1, seed=0)


def pooled_sequence(
    prompt: Sequence[int],
    params: PoolingParams,
    info: RunnerInfo,
    on_end: Callable[[PoolingEnd], None],
    *,
    field: str = "token_ids",
    salt: str = "",
    priority: int = 3,
    deadline_in_ms: int = 0,
) -> ScheduledSequence:
    """The sequence that the scheduler is to have. `field` names the prompt. Raises InvalidArgument or Unimplemented."""
    validation.validate_prompt(prompt, vocab_size=info.vocab_size, context_tokens=info.context_tokens, field=field)
    check_params(params, info)
    admission = Admission(
        seq_id=SequenceId(secrets.token_hex(16)),
        epoch=1,
        prompt=prompt,
        sampling=NO_OUTPUT,
        salt=salt,
        priority=priority,
        deadline_in_ms=deadline_in_ms,
    )
    root = hashing.root_key(info.fingerprint, info.layout, salt=salt, numerics=info.numerics)
    sequence = ScheduledSequence.from_admission(admission, root=root, now=time.monotonic())
    sequence.pooling = Pooling(params, on_end)
    return sequence


def check_params(params: PoolingParams, info: RunnerInfo) -> None:
    """Raises what is wrong with the parameters for this model."""
    if not info.pooling.hidden_size and params.kind is not PoolKind.LOGITS:
        raise Unimplemented(f"the hidden states of model {info.model} cannot be read")
    if not 0 <= params.dimensions <= info.pooling.hidden_size:
        raise InvalidArgument("dimensions", f"{params.dimensions} is not from 1 to {info.pooling.hidden_size}")
    if (params.kind is PoolKind.LOGITS) != bool(params.token_ids):
        raise InvalidArgument("pooling", "logits need token ids, and nothing else has them")
    sampling_validation.check_token_ids("logit_token_ids", params.token_ids, info.vocab_size)
