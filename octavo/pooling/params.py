"""How a prompt becomes a vector (`PoolingParams`), and what a model's files say of that (`ModelPooling`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from octavo.request.errors import InvalidArgument, Unimplemented

MAX_INPUTS = 2048  # of one call
MAX_CALL_TOKENS = 1 << 20  # of all inputs of one call together
MAX_INSTRUCTION_BYTES = 4096


class PoolKind(IntEnum):
    """What a vector is made of."""

    LAST = 1  # the hidden state of the last token
    MEAN = 2  # the mean of the hidden states of all tokens
    LOGITS = 3  # the logits of some tokens after the last one


POOLINGS = {"last": PoolKind.LAST, "mean": PoolKind.MEAN}  # that callers may name


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is asked of one prompt."""

    kind: PoolKind = PoolKind.LAST
    normalize: bool = True  # to the length 1; of no logits
    dimensions: int = 0  # so many leading numbers, which are normalized after the cut; 0: all
    token_ids: tuple[int, ...] = ()  # LOGITS: of which tokens

    @property
    def needs_all_rows(self) -> bool:
        """Whether every token has to be computed for this prompt: blocks of other prompts have no hidden states."""
        return self.kind is PoolKind.MEAN


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """What a model can be asked, and what a request that says nothing gets."""

    hidden_size: int = 0  # numbers of a hidden state; 0: the model gives none
    kind: PoolKind = PoolKind.LAST
    normalize: bool = True
    judge: str = (
        ""  # the template by which the model judges documents, one of octavo.pooling.judges; empty: it does not
    )
    refusal: str = ""  # why the model's own way is not there; a request may name another one

    def resolved(self, pooling: str = "", normalize: bool | None = None, dimensions: int = 0) -> PoolingParams:
        """What a request gets. Raises InvalidArgument, or Unimplemented if the model has no such vectors."""
        if not self.hidden_size:
            raise Unimplemented("this model's hidden states cannot be read; use a decoder that octavo runs itself")
        if pooling and pooling not in POOLINGS:
            raise InvalidArgument("pooling", f"{pooling[:32]!r} is not one of {', '.join(POOLINGS)}")
        if self.refusal and not pooling:
            raise Unimplemented(f"{self.refusal}; name the pooling: {' or '.join(POOLINGS)}")
        if not 0 <= dimensions <= self.hidden_size:
            raise InvalidArgument("dimensions", f"{dimensions} is not from 1 to {self.hidden_size}")
        kind = POOLINGS[pooling] if pooling else self.kind
        return PoolingParams(kind, self.normalize if normalize is None else normalize, dimensions)


def logits_of(token_ids: Sequence[int]) -> PoolingParams:
    """Asks for the logits of these tokens after the last one of a prompt."""
    return PoolingParams(PoolKind.LOGITS, normalize=False, token_ids=tuple(token_ids))


def check_call(num_inputs: int, field: str) -> None:
    """Raises InvalidArgument unless one call may have so many inputs."""
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidArgument(field, f"{num_inputs} of them; give 1 to {MAX_INPUTS}")


def check_tokens(num_tokens: int, field: str) -> None:
    """Raises InvalidArgument if the inputs of one call have too many tokens together."""
    if num_tokens > MAX_CALL_TOKENS:
        raise InvalidArgument(field, f"{num_tokens} tokens together; give at most {MAX_CALL_TOKENS}, or several calls")
