"""POST /v1/audio/transcriptions: a sound, and how what is said there is written down."""

import math
from dataclasses import dataclass

from octavo.pictures.long_speech import INCREMENT, LOGPROB_THRESHOLD, MOST_TOKENS, NO_SPEECH_THRESHOLD, SpeechOptions
from octavo.request.ids import new_request_id
from octavo.request.limits import NumberRange
from octavo.text.encoded_prompt import NO_SPEECH
from octavo.v1 import inference_pb2
from router.http.bodies.common_fields import AskedAnswer, read_common, read_max_tokens
from router.http.bodies.field_reader import FieldReader
from router.http.bodies.unknown_fields import ClientBody, refusal_of

ID_PREFIX = "trsc-"
FILE = "file"
JSON, TEXT, VERBOSE, SRT, VTT = FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
CONDITIONS = "condition_on_previous_text"  # Whisper's own name
GRANULARITIES = ("timestamp_granularities", "timestamp_granularities[]")
NOT_TOLD = "is not supported: no scores are shown, and nobody is told apart; leave it out"
# Of a transcription, whatever other requests may have.
ONE_TEXT = ("n", "best_of", "return_token_ids", "return_tokens_as_token_ids", "echo", "logprobs", "stream_options")
# Of prompts that are text.
OF_TEXT = ("add_special_tokens", "prefix", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side")


@dataclass(slots=True)
class AskedTranscription:
    """What a form asks for. The request has no sound yet."""

    answer: AskedAnswer
    sound: memoryview  # the bytes of its file: large, so whoever has taken them puts none in their place
    shown: str  # one of FORMATS
    options: SpeechOptions

    @property
    def with_times(self) -> bool:
        """Whether times are to be written down: they are shown, or parts are judged as Whisper's are."""
        return self.shown in (VERBOSE, SRT, VTT) or bool(self.options.judging)


def read_transcription(fields_sent: ClientBody) -> AskedTranscription:
    """What the form asks for. Raises InvalidArgument with all that is wrong and can be seen."""
    fields, request = FieldReader(fields_sent), inference_pb2.GenerateRequest()
    for name in ONE_TEXT:
        fields.take_harmless(name, [False, 1], "is not supported: one text is answered; leave it out")
    for name in OF_TEXT:
        if fields.take_any(name) is not None:
            fields.refuse(name, "is not supported: the prompt is a sound; leave it out")
    sound = fields.take_any(FILE)
    if not isinstance(sound, memoryview):
        fields.refuse(FILE, "is missing; send the bytes of a WAV file")
        sound = memoryview(b"")
    speech = request.speech
    speech.language = fields.take_text("language")
    speech.previous_text = fields.take_text("prompt")
    speech.task = fields.take_text("task")
    if speech.task == NO_SPEECH:
        fields.refuse("task", f"is one over gRPC alone; send response_format: {VERBOSE}, which shows no_speech_prob")
    shown = fields.take_text("response_format", JSON)
    if shown not in FORMATS:
        fields.refuse("response_format", f"must be one of {', '.join(FORMATS)}")
    options = _read_options(fields, shown)
    _read_granularities(fields, shown)
    fields.take_harmless(
        "chunking_strategy", ["", "auto"], "is not supported: long sounds are divided by what is heard"
    )
    for name in ("include", "include[]"):
        fields.take_harmless(name, ["", []], NOT_TOLD)
    asked = read_common(fields, request)
    if not asked.chosen_id:
        request.request_id = ID_PREFIX + new_request_id()[2:]
    if read_max_tokens(fields, request.sampling, "max_tokens", "max_completion_tokens") is None:
        request.sampling.max_tokens = MOST_TOKENS
    if not request.sampling.HasField("temperature"):
        request.sampling.temperature = 0.0  # OpenAI's
    if asked.stream and shown != JSON:
        fields.refuse("response_format", "must be json beside stream: true")
    fields.refuse_rest(refusal_of)
    if request.sampling.beam_width and options.judging:
        fields.refuse(options.judging, "does not go with beams; leave it out")
    fields.checks.raise_found()
    return AskedTranscription(asked, sound, shown, options)


def _read_options(fields: FieldReader, shown: str) -> SpeechOptions:
    options = SpeechOptions(
        fields.take_flag(CONDITIONS),
        fields.take_number(INCREMENT, NumberRange(0, 1)) or 0.0,
        fields.take_number(NO_SPEECH_THRESHOLD, NumberRange(0, 1)),
        fields.take_number(LOGPROB_THRESHOLD, NumberRange(-math.inf, 0)),
        tells_quality=shown == VERBOSE,
    )
    fields.checks.run(options.check_thresholds)
    return options


def _read_granularities(fields: FieldReader, shown: str) -> None:
    """Takes of what times are wanted: of texts alone, where times are shown."""
    for name in GRANULARITIES:
        value = fields.take_any(name)
        wanted = [value] if isinstance(value, str) else value or []
        if not isinstance(wanted, list) or not all(each in ("segment", "") for each in wanted):
            fields.refuse(name, "must be segment: words and other things have no times of their own")
        elif "segment" in wanted and shown != VERBOSE:
            fields.refuse(name, f"is allowed only beside response_format: {VERBOSE}")
