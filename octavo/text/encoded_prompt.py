"""Prompts of models with an encoder (T5, BART): what the encoder reads, then the tokens by which the decoder starts.

The encoder reads all of its tokens at once, and each of them changes what it gives for all others. So blocks of such a
prompt are of use to equal prompts alone, and the salt of their hashes has a digest of the whole prompt.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSupport:
    """How prompts of a model are made that has an encoder. By default it has none."""

    start: tuple[int, ...] = ()  # the tokens by which the decoder starts; empty: there is no encoder
    max_encoded: int = 0  # how many tokens the encoder reads at most
    max_output: int = 0  # tokens of output at most

    @property
    def exists(self) -> bool:
        return bool(self.start)

    def num_encoded(self, num_prompt: int) -> int:
        """How many tokens of a prompt the encoder reads."""
        return num_prompt - len(self.start) if self.start else 0

    def num_given(self, num_prompt: int) -> int:
        """How many tokens of a prompt are those that a client gave, whether the model has an encoder or not."""
        return num_prompt - len(self.start)

    def prompt_of(self, token_ids: Sequence[int], field: str) -> list[int]:
        """The prompt of a sequence whose encoder reads these tokens. Raises InvalidArgument if they are too many."""
        if self.exists and not token_ids:
            raise InvalidArgument(field, "the prompt is empty; the encoder needs at least one token")
        if self.exists and len(token_ids) > self.max_encoded:
            raise InvalidArgument(
                field, f"{len(token_ids)} tokens; this model's encoder reads at most {self.max_encoded}: shorten it"
            )
        return [*token_ids, *self.start]

    def salt_of(self, salt: str, prompt: Sequence[int]) -> str:
        """The salt of a sequence of a tenant of that salt."""
        if not self.exists:
            return salt
        return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"octavo.encoded").hexdigest() + _digest(
            prompt
        )

    def context_for(self, num_prompt: int, context_tokens: int) -> int:
        """How long a sequence of such a prompt may be, where a model's sequences may have `context_tokens`."""
        return min(context_tokens, num_prompt + self.max_output) if self.exists else context_tokens

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises InvalidArgument for parameters that ask for what such a model does not have."""
        if self.exists and params.prompt_logprobs is not None:
            raise InvalidArgument(
                "prompt_logprobs", "this model encodes its prompt, and gives no probabilities of it: leave it out"
            )

    def check_sequence(self, prompt: Sequence[int], salt: str, params: SamplingParams) -> None:
        """Raises InvalidArgument unless a sequence is one that `prompt_of` and `salt_of` have made."""
        if not self.exists:
            return
        num_encoded = self.num_encoded(len(prompt))
        if num_encoded < 1 or tuple(prompt[num_encoded:]) != self.start:
            raise InvalidArgument("prompt", f"does not end with the tokens that start the decoder: {[*self.start]}")
        self.prompt_of(prompt[:num_encoded], "prompt")
        if not salt.endswith(_digest(prompt)):
            raise InvalidArgument("salt", "has no digest of the prompt, which the encoder reads whole")
        self.check_sampling(params)
        if params.max_tokens is None or params.max_tokens > self.max_output:
            raise InvalidArgument("sampling.max_tokens", f"{params.max_tokens}; the decoder has {self.max_output}")


def _digest(prompt: Sequence[int]) -> str:
    data = struct.pack(f"<{len(prompt)}I", *prompt)
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"octavo.encoded").hexdigest()


NO_ENCODER = EncoderSupport()
