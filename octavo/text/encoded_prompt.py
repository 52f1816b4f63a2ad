"""Prompts of models with an encoder (T5, BART): what the encoder reads, then the tokens by which the decoder starts.

The encoder reads all of its tokens at once, and each of them changes what it gives for all others. So blocks of such a
prompt are of use to equal prompts alone, and the salt of their hashes has a digest of the whole prompt.

The encoder of Whisper reads a sound, whose digest is in the hashes of its blocks as that of a picture is. Placeholders
stand for it in the prompt. The tokens after them say which language is spoken and what is to be written; the words that
came before the sound may stand in front of those.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import SamplingParams

DIGEST_BYTES = 16
TRANSCRIBE = "transcribe"
NAME_LANGUAGE = "language"  # the task of which the output is the token of a language
NO_SPEECH = "no_speech"  # that of which the output is the token that says that nobody speaks: its probability counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSupport:
    """What a model knows of speech."""

    placeholder: int  # the token that stands for a part of a sound
    start: int  # the first token of the decoder
    no_timestamps: int  # the token that says that text without times follows; those of times are all behind it
    previous: int  # the token before what was said before the sound
    max_previous: int  # how many tokens of that the decoder is given: the last ones
    languages: Mapping[str, int] = field(default_factory=dict)  # empty: one language, which no token names
    tasks: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_time(self) -> int:
        """The token of the time 0. Each one after it is of a time that is 0.02 s later."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """The token that says that nobody speaks, as Transformers finds it."""
        return self.no_timestamps - 1

    def start_of(
        self, language: str, task: str, previous: Sequence[int], field: str, *, times: bool = False
    ) -> list[int]:
        """The tokens by which the decoder starts; with `times`, text stands between tokens of times.

        Raises InvalidArgument for what the model does not know.
        """
        language = language.lower()
        before = [self.previous, *previous[-self.max_previous :]] if previous else []
        end = [] if times else [self.no_timestamps]
        if task == NO_SPEECH and (language or times):
            raise InvalidArgument(f"{field}.task", "asks whether somebody speaks: leave out language and times")
        if task == NAME_LANGUAGE and self.languages and (language or previous or times):
            raise InvalidArgument(f"{field}.task", "asks which language it is: send the sound alone")
        if task == NO_SPEECH or (task == NAME_LANGUAGE and self.languages):
            return [*before, self.start]
        if not self.languages:
            if language not in ("", "en") or task not in ("", TRANSCRIBE):
                raise InvalidArgument(
                    f"{field}.{'language' if language not in ('', 'en') else 'task'}",
                    "this model writes English speech down, and nothing else: leave it out, or ask another model",
                )
            return [*before, self.start, *end]
        if language not in self.languages:
            named = f"there is no {language[:32]!r}" if language else "is missing"
            raise InvalidArgument(f"{field}.language", f"{named}; name one of {', '.join(sorted(self.languages))}")
        if (task := task or TRANSCRIBE) not in self.tasks:
            raise InvalidArgument(f"{field}.task", f"there is no {task[:32]!r}; name one of {', '.join(self.tasks)}")
        return [*before, self.start, self.languages[language], self.tasks[task], *end]

    def has_times(self, tokens: Sequence[int]) -> bool:
        """Whether text between tokens of times follows on these, by which the decoder starts."""
        return tokens[-1] in self.tasks.values() if self.languages else tokens[-1] == self.start

    def check_start(self, tokens: Sequence[int]) -> None:
        """Raises InvalidArgument unless `start_of` may have made these tokens."""
        place = tokens.index(self.start) if self.start in tokens else len(tokens)
        before, named = list(tokens[:place]), list(tokens[place + 1 :])
        wanted = [set(self.languages.values()), set(self.tasks.values())] if self.languages else []
        end = named[len(wanted) :]
        is_known = len(named) >= len(wanted) and end in ([], [self.no_timestamps]) and place < len(tokens)
        is_known = is_known and all(token in known for token, known in zip(named, wanted, strict=False))
        if not named and place < len(tokens):
            is_known = True  # it is asked which language it is, or whether somebody speaks
        if before and not (before[0] == self.previous and 1 < len(before) <= self.max_previous + 1):
            is_known = False
        if not is_known:
            raise InvalidArgument("prompt", "does not end with the tokens that start the decoder: send speech")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSupport:
    """How prompts of a model are made that has an encoder. By default it has none."""

    start: tuple[int, ...] = ()  # the tokens by which the decoder starts; empty: there is no encoder
    max_encoded: int = 0  # how many tokens the encoder reads at most
    max_output: int = 0  # tokens of output at most
    speech: SpeechSupport | None = (
        None  # the encoder reads `max_encoded` placeholders of a sound; None: it reads tokens
    )

    @property
    def exists(self) -> bool:
        return bool(self.start)

    def num_encoded(self, num_prompt: int) -> int:
        """How many tokens of a prompt the encoder reads."""
        if self.speech is not None:
            return self.max_encoded
        return num_prompt - len(self.start) if self.start else 0

    def num_given(self, num_prompt: int) -> int:
        """How many tokens of a prompt are those that a client gave, whether the model has an encoder or not."""
        return num_prompt - len(self.start) if self.speech is None else num_prompt

    def prompt_of(self, token_ids: Sequence[int], field: str) -> list[int]:
        """The prompt of a sequence whose encoder reads these tokens. Raises InvalidArgument if they are too many."""
        if self.speech is not None:
            return list(token_ids)
        if self.exists and not token_ids:
            raise InvalidArgument(field, "the prompt is empty; the encoder needs at least one token")
        if self.exists and len(token_ids) > self.max_encoded:
            raise InvalidArgument(
                field, f"{len(token_ids)} tokens; this model's encoder reads at most {self.max_encoded}: shorten it"
            )
        return [*token_ids, *self.start]

    def salt_of(self, salt: str, prompt: Sequence[int]) -> str:
        """The salt of a sequence of a tenant of that salt."""
        if not self.exists or self.speech is not None:
            return salt
        return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"octavo.encoded").hexdigest() + _digest(
            prompt
        )

    def context_for(self, num_prompt: int, context_tokens: int) -> int:
        """How long a sequence of such a prompt may be, where a model's sequences may have `context_tokens`."""
        if not self.exists or self.speech is not None:
            return context_tokens
        return min(context_tokens, num_prompt + self.max_output)

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
        if self.speech is not None:
            self.speech.check_start(prompt[num_encoded:])
            self.check_sampling(params)
            return
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
