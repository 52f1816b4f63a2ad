"""POST /v1/audio/transcriptions: a sound, and how what is said there is written down."""

from octavo.request.ids import new_request_id
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_common, read_max_tokens
from router.http.bodies.field_reader import FieldReader
from router.http.bodies.unknown_fields import ClientBody, refusal_of

ID_PREFIX = "trsc-"
FILE = "file"
FORMATS = ("json", "text")
NO_TIMES = "is not supported: no times are written, and nobody is told apart; leave it out"
WITHOUT_TIMES = f"must be one of {', '.join(FORMATS)}: no times are written"
# Of a transcription, whatever other requests may have.
ONE_TEXT = ("n", "best_of", "return_token_ids", "return_tokens_as_token_ids", "echo", "logprobs", "stream_options")
# Of prompts that are text.
OF_TEXT = ("add_special_tokens", "prefix", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side")
MOST_TOKENS = 1 << 16  # more than any model writes down at once: what is left of its context counts


def read_transcription(fields_sent: ClientBody) -> tuple[AskedAnswer, str]:
    """What the form asks for, and in which format. Raises InvalidArgument with all that is wrong and can be seen."""
    fields, request = FieldReader(fields_sent), inference_pb2.GenerateRequest()
    for name in ONE_TEXT:
        fields.take_harmless(name, [False, 1], "is not supported: one text is answered; leave it out")
    for name in OF_TEXT:
        if fields.take_any(name) is not None:
            fields.refuse(name, "is not supported: the prompt is a sound; leave it out")
    sound = fields.take_any(FILE)
    if not isinstance(sound, bytes):
        fields.refuse(FILE, "is missing; send the bytes of a WAV file")
    speech = request.speech
    speech.sound = sound if isinstance(sound, bytes) else b""
    speech.language = fields.take_text("language")
    speech.previous_text = fields.take_text("prompt")
    speech.task = fields.take_text("task")
    shown = fields.take_text("response_format", FORMATS[0])
    if shown not in FORMATS:
        fields.refuse("response_format", WITHOUT_TIMES)
    fields.take_harmless(
        "chunking_strategy", [""], "is not supported: sounds that are too long are cut by who sends them"
    )
    for name in ("timestamp_granularities", "timestamp_granularities[]", "include", "include[]"):
        fields.take_harmless(name, ["", []], NO_TIMES)
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    if read_max_tokens(fields, request.sampling, "max_tokens", "max_completion_tokens") is None:
        request.sampling.max_tokens = MOST_TOKENS
    if not request.sampling.HasField("temperature"):
        request.sampling.temperature = 0.0  # OpenAI's
    if asked.stream and shown != FORMATS[0]:
        fields.refuse("response_format", "must be json beside stream: true")
    fields.refuse_rest(refusal_of)
    fields.checks.raise_found()
    return asked, shown
