"""Sequences for tests, as admissions make them."""

from collections.abc import Sequence as SequenceOf
from typing import Any

from gpu_worker.scheduling.state.sequence import Sequence
from octavo.request.ids import SequenceId
from octavo.request.record import Admission
from octavo.request.sampling import SamplingParams
from octavo.request.step_item import StepItem
from octavo.text.stop import TextStream
from octavo.text.tokenizers.byte_tokenizer import ByteTokenizer


def new_sequence(
    name: str,
    prompt: SequenceOf[int],
    params: SamplingParams,
    *,
    root: bytes = bytes(32),
    now: float = 0.0,
    beam_text: TextStream | None = None,
    **fields: Any,
) -> Sequence:
    """The sequence of an admission; `fields` are further fields of octavo.request.record.Admission."""
    admission = Admission(**{"seq_id": SequenceId(name), "epoch": 1, "prompt": prompt, "sampling": params, **fields})
    sequence = Sequence.from_admission(admission, root=root, now=now)
    sequence.beam_text = beam_text
    return sequence


def beam_text(params: SamplingParams, eos_token_ids: tuple[int, ...] = ()) -> TextStream | None:
    """The text in which stop strings end beams, where a token is a byte."""
    if not (params.beam_width and params.stop):
        return None
    return TextStream.of_branch(ByteTokenizer().detokenizer(), params, eos_token_ids)


def item_of(sequence: Sequence, branch: int, first_index: int, token_ids: SequenceOf[int], **fields: Any) -> StepItem:
    """What a step brings of a sequence: an item that the journal does not have yet."""
    return StepItem(sequence.seq_id, sequence.epoch, branch, first_index, tuple(token_ids), **fields)
