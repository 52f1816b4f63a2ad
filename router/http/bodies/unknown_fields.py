"""Top-level fields of a body that no reader takes: which change no answer, and what becomes of others."""

from collections.abc import Mapping, Sequence
from typing import Any

REFUSE, WARN = "refuse", "warn"
MAX_SHOWN_NAME = 64  # characters of a field's name in a message or header
MAX_NAMED = 10  # unknown fields in one message
MAX_NAMED_IGNORED = 64  # fields in one header
ANY: tuple[object, ...] = ()  # whatever the value is
OFF: tuple[object, ...] = (False, 0)
# What servers of this API take and no answer here depends on, by who has it. A field with values is harmless with these
# alone, by which clients say that they do not want what the field is for.
HARMLESS: Mapping[str, Sequence[object]] = {
    # OpenAI: names of users and conversations, where it keeps and runs what, and guesses of the answer
    "user": ANY,
    "metadata": ANY,
    "store": ANY,
    "service_tier": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prediction": ANY,
    # vLLM
    "add_vision_id": ANY,
    "data_parallel_rank": ANY,
    "early_stopping": OFF,
    "guided_decoding_backend": ANY,
    "mm_processor_kwargs": ANY,
    "spaces_between_special_tokens": (True,),
    # SGLang
    "bootstrap_host": ANY,
    "bootstrap_port": ANY,
    "bootstrap_room": ANY,
    "log_metrics": ANY,
    "no_stop_trim": OFF,
    "return_hidden_states": OFF,
    "rid": ANY,
    "routed_dp_rank": ANY,
    # llama.cpp, whose page sends all of its samplers with each request
    "cache_prompt": ANY,
    "dry_allowed_length": ANY,
    "dry_base": ANY,
    "dry_multiplier": OFF,
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "dynatemp_exponent": ANY,
    "dynatemp_range": OFF,
    "id_slot": ANY,
    "mirostat": OFF,
    "mirostat_eta": ANY,
    "mirostat_tau": ANY,
    "n_cache_reuse": ANY,
    "n_probs": OFF,
    "post_sampling_probs": ANY,
    "repeat_last_n": ANY,
    "repeat_penalty": (1,),
    "return_progress": ANY,
    "tfs_z": (1,),
    "timings_per_token": ANY,
    "top_n_sigma": (-1,),
    "typ_p": (1,),
}
# What other servers call what has another name here.
INSTEAD: Mapping[str, str] = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar, with a Lark grammar",
    "ebnf": "structured_outputs.grammar, with a Lark grammar",
    "grammar": "structured_outputs.grammar, with a Lark grammar",
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "typ_p": "typical_p",
}


NOT_SUPPORTED = "is not supported; leave it out"


def refusal_of(name: str) -> str:
    """What is said of a field of a completion that changes the answer elsewhere."""
    instead = INSTEAD.get(name)
    return f"is not supported; say {instead}" if instead else NOT_SUPPORTED


class ClientBody(dict[str, Any]):
    """The body of a request. It notes which fields were left out of account."""

    def __init__(self, fields: Mapping[str, Any], mode: str = REFUSE) -> None:
        super().__init__(fields)
        self._mode = mode
        self.ignored: list[str] = []

    def ignores(self, name: str, value: object) -> bool:
        """Whether the field that nobody has taken changes no answer, or is left out of account for all that."""
        if self._mode == WARN or is_harmless(name, value):
            self.ignored.append(shown_name(name))
            return True
        return False


def is_harmless(name: str, value: object) -> bool:
    allowed = HARMLESS.get(name)
    if allowed is None:
        return False
    is_plain = isinstance(value, (bool, int, float))
    return allowed is ANY or (is_plain and any(value == each for each in allowed))


def shown_name(name: str) -> str:
    """The name as a message or a header can have it."""
    return "".join(char if " " < char < "\x7f" and char != "," else "?" for char in name[:MAX_SHOWN_NAME])


def ignored_header(names: Sequence[str]) -> str:
    """The names in one line, of which a great many are cut."""
    more = [f"(and-{len(names) - MAX_NAMED_IGNORED}-more)"] if len(names) > MAX_NAMED_IGNORED else []
    return ", ".join([*names[:MAX_NAMED_IGNORED], *more])
