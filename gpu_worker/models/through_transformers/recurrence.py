"""Recurrent layers of a Transformers model: the operations by which they remember, with blocks in the place of a cache.

Transformers' layers call functions of their module for what looks back: a convolution over the last inputs, and a
matrix for each head that each token fades and adds to (gated delta rule, Kimi's delta attention, Mamba 1 and 2). A
layer without a cache calls the forms for whole prompts. Within `keeping` these are replaced by ours, which take the
tokens of several sequences, one after another, and go on from the states in their blocks. Projections, norms and gates
stay the model's own code. Outside of it Transformers' own functions run.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from gpu_worker.models.decoders.decoder import by_registers, silu
from gpu_worker.models.through_transformers.states import StepStates
from gpu_worker.ops import Ops

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "swish": silu}
exponential, softplus = by_registers(torch.exp), by_registers(functional.softplus)
AT_ONCE = 64  # tokens: Mamba 1 has a number for each of them, each channel and each of its state
CACHED_NUMBERS = 1 << 19  # of states of several sequences that are changed at once, and should stay in a core's cache
NORM_EPS = 1e-6  # of queries and keys of delta rules


class Recurrences:
    """The operations of a step. Each has the first parameters of the function that it stands for."""

    def __init__(self, ops: Ops, states: StepStates) -> None:
        self._ops = ops
        self.states = states

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, channels, num_tokens]: each output is made of as many inputs as `weight` [channels, width] is wide."""
        inputs, width = hidden_states[0].T.contiguous(), weight.shape[-1]
        index = self.states.claim("inputs", (width - 1, inputs.shape[1]), inputs.dtype)
        taps = weight.float().T
        if self.states.of_one:
            line = torch.cat((self.states.rows_before(index, self.states.runs), inputs[:, None]), dim=1)
            self.states.keep_rows(index, self.states.runs, line[:, 1:])
            seen = [*line.float().unbind(1)]
        else:
            seen = self._seen(index, inputs, width)
        total = seen[0] * taps[0]
        for given, tap in zip(seen[1:], taps[1:], strict=True):  # one after another, whatever the number of tokens
            total = total + given * tap
        if bias is not None:
            total = total + bias.float()
        if activation is not None:
            total = ACTIVATIONS.get(activation, ACT2FN[activation])(total)
        return total.to(hidden_states.dtype).T.unsqueeze(0)

    def _seen(self, index: int, inputs: Tensor, width: int) -> list[Tensor]:
        """For each tap what it sees of `inputs` [num_tokens, channels] and of those before them."""
        known, places, first = [], [], 0
        for run in self.states.runs:
            known += [self.states.before(index, run), inputs[run.begin : run.end]]
            places += [*range(first, first + run.end - run.begin)]
            first += width - 1
            for piece in run.pieces:
                last = torch.cat(known[-2:])[piece.end - run.begin :][: width - 1]
                self.states.keep(index, piece, last)
            first += run.end - run.begin
        line, rows = torch.cat(known).float(), torch.tensor(places, device=inputs.device)
        return [line[rows + tap] for tap in range(width)]

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *_: Any,
        use_qk_l2norm_in_kernel: bool = False,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """Also Kimi's delta attention, where `g` has a number for each dimension of a key."""
        queries, keys, values = (x[0].float() for x in (query, key, value))
        if use_qk_l2norm_in_kernel:
            queries, keys = _normalized(queries), _normalized(keys)
        queries = queries * queries.shape[-1] ** -0.5
        outputs = self._recur("delta", queries, keys, values, _fading(g[0].float()), beta[0].float())
        return outputs.to(query.dtype).unsqueeze(0), None

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *_: Any,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **__: Any,
    ) -> Tensor:
        """[1, num_tokens, num_heads, head_dim]; a number fades all of a head's state."""
        if z is not None:
            raise RuntimeError("a Mamba layer with its gate inside the scan is not known")
        inputs, steps = hidden_states[0].float(), _steps(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).float()
        values = inputs * steps[..., None]
        outputs = self._recur("mamba2", C[0].float(), B[0].float(), values, _fading(A.float() * steps), None)
        if D is not None:
            outputs = outputs + D.float()[..., None] * inputs
        return outputs.unsqueeze(0)

    def mamba1(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """[1, channels, num_tokens]: each channel is a head, which has a number that fades for each of its state."""
        inputs = hidden_states[0].T.float()
        steps = _steps(dt[0].T, delta_bias, delta_softplus).float()
        rates = A.float()
        queries, keys = C[0].T.float()[:, None], B[0].T.float()[:, None]
        values = (steps * inputs)[..., None]
        outputs = self._recur("mamba1", queries, keys, values, lambda part: _fade(rates * steps[part, :, None]), None)
        outputs = outputs[..., 0]
        if D is not None:
            outputs = outputs + inputs * D.float()
        if z is not None:
            outputs = outputs * silu(z[0].T.float())
        return outputs.to(hidden_states.dtype).T.unsqueeze(0)

    def _recur(
        self,
        kind: str,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        decays: Callable[[slice], Tensor],
        rates: Tensor | None,
    ) -> Tensor:
        """`Ops.linear_recurrence` over all tokens of the step. `decays` makes those of some tokens."""
        shape = values.shape[1], keys.shape[-1], values.shape[-1]
        index, outputs = self.states.claim(kind, shape, torch.float32), torch.empty_like(values)
        if self.states.of_one:
            at_once = max(1, CACHED_NUMBERS // prod(shape))
            for first in range(0, len(self.states.runs), at_once):
                runs = self.states.runs[first : first + at_once]
                part = slice(first, first + len(runs))
                state = self.states.rows_before(index, runs)
                one = _beside(queries[part]), _beside(keys[part]), _beside(values[part]), _beside(decays(part))
                rate = None if rates is None else _beside(rates[part])
                read = self._ops.linear_recurrence(state.flatten(0, 1), *one, rate)
                outputs[part] = read.view(outputs[part].shape)
                self.states.keep_rows(index, runs, state)
            return outputs
        for run in self.states.runs:
            state = self.states.before(index, run)
            for piece in run.pieces:
                for begin in range(piece.begin, piece.end, AT_ONCE):
                    part = slice(begin, min(begin + AT_ONCE, piece.end))
                    given = queries[part], keys[part], values[part], decays(part)
                    rate = None if rates is None else rates[part]
                    outputs[part] = self._ops.linear_recurrence(state, *given, rate)
                self.states.keep(index, piece, state)
        return outputs


def _beside(each: Tensor) -> Tensor:
    """The heads of tokens of several sequences as those of one token."""
    return each.flatten(0, 1).unsqueeze(0)


def _fade(logarithms: Tensor) -> Tensor:
    """exp of [num_tokens, ...], whose bits do not depend on the number of tokens."""
    return exponential(logarithms.flatten(1)).reshape(logarithms.shape)


def _fading(logarithms: Tensor) -> Callable[[slice], Tensor]:
    return lambda part: _fade(logarithms[part])


def _normalized(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()


def _steps(dt: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(steps) if positive else steps


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": Recurrences.convolve,
    "torch_chunk_gated_delta_rule": Recurrences.gated_delta,
    "chunk_kimi_delta_attention": Recurrences.gated_delta,
    "mamba2_chunk_scan": Recurrences.mamba2,
    "mamba_selective_scan": Recurrences.mamba1,
}
_MARK = "octavo_own"


_current: ContextVar[Recurrences | None] = ContextVar("octavo_recurrences", default=None)  # a step per thread


def replace_recurrences(model: nn.Module) -> None:
    """Lets the layers of a model, and of others of its kind, call our operations within `keeping`."""
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, method in REPLACED.items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, _MARK):
                setattr(module, name, _replacement(function, method))


def _replacement(own: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        recurrences = _current.get()
        return own(*args, **kwargs) if recurrences is None else method(recurrences, *args, **kwargs)

    setattr(call, _MARK, own)
    return call


@contextmanager
def keeping(recurrences: Recurrences) -> Iterator[None]:
    """Within this, what a model remembers of its sequences is read from the states of a step, and kept there."""
    token = _current.set(recurrences)
    try:
        yield
        recurrences.states.end()
    finally:
        _current.reset(token)
