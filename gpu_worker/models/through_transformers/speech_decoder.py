"""Whisper: an encoder that reads half a minute of sound, and a decoder that writes down what is said there.

The placeholders of a sound are the tokens that the encoder has read. All else is as in T5 and BART: their slots hold
the keys and values of cross attention. The encoder runs once for a sound, beside steps, as that of pictures does.
"""

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSpeechSeq2Seq

from gpu_worker.models.packed.packed_linear import LinearPacking
from gpu_worker.models.through_transformers.encoder_decoder import EncoderDecoder, running_as
from gpu_worker.models.through_transformers.encoder_step import Encoding
from gpu_worker.models.through_transformers.log_mel import HOP, WINDOW, log_mel
from gpu_worker.ops import Ops, TokenBatch
from gpu_worker.ops.batch import EncodedRows
from octavo.model_files.json_file import read_json
from octavo.pictures.support import RATE, SAMPLES_PER_POSITION, PictureSupport
from octavo.request.errors import BadModel, InvalidArgument
from octavo.text.encoded_prompt import EncoderSupport, SpeechSupport

FILE = "preprocessor_config.json"
# What the feature extractor does unless the file says otherwise, and octavo always does.
ALWAYS = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW, "dither": 0.0, "do_normalize": False}
TOKENS = ("decoder_start_token_id", "eos_token_id", "no_timestamps_token_id", "prev_sot_token_id")
MOST_AT_FIRST = 50  # of 0.02 s: Whisper's own, where generation_config.json does not say it
KERNEL = 3  # of the encoder's convolutions, which make SAMPLES_PER_POSITION of HOP


class SoundEncoder:
    """An EncodePicture, whose pixels are the samples of a sound. It encodes one at a time."""

    def __init__(self, model: Any, ops: Ops, support: PictureSupport, device: torch.device) -> None:
        self._encoder = model.get_encoder()
        self._support = support
        self._num_bands = int(model.config.num_mel_bins)
        self._device = device
        self._dtype = next(model.parameters()).dtype
        self.width = int(model.config.d_model)
        self.number_bytes: int = self._dtype.itemsize
        for layer in (self._encoder.conv1, self._encoder.conv2):
            layer.forward = functools.partial(_convolved, ops, layer)

    def features(self, samples: bytes) -> Tensor:
        """[1, bands, frames]. Raises InvalidArgument for bytes that are no sound of the encoder's length."""
        most = self._support.max_samples
        if len(samples) % 4 or not 0 < len(samples) <= 4 * most:
            raise InvalidArgument("pictures", f"{len(samples)} bytes are no sound: send the request again")
        found = log_mel(np.frombuffer(samples, dtype="<f4"), most, self._num_bands)
        return torch.from_numpy(found)[None].to(self._device, self._dtype)

    @torch.inference_mode()
    def __call__(self, pixels: bytes, height: int, width: int) -> Tensor:
        with running_as(Encoding()):
            states: Tensor = self._encoder(input_features=self.features(pixels)).last_hidden_state[0]
        return states.to("cpu")


def _convolved(ops: Ops, layer: nn.Conv1d, x: Tensor) -> Tensor:
    """The convolution as a product, whose bits do not depend on how many threads there are."""
    pieces = functional.pad(x, (1, 1)).unfold(2, KERNEL, layer.stride[0])[0]  # [channels, frames, KERNEL]
    rows = pieces.permute(1, 0, 2).flatten(1).contiguous()
    return ops.linear(rows, layer.weight.flatten(1).contiguous(), layer.bias).T[None].contiguous()


class TimeRules:
    """Which tokens may come where text stands between tokens of times: the rules of Whisper's own timestamps.

    Times come in pairs, with text between the pairs; none is before the one before it. All follows from the output so
    far and from the logits of the next token, so it does not matter where a sequence is continued.
    """

    def __init__(self, first: int, end: int, most_at_first: int) -> None:
        """`first`: the token of the time 0, which all of times follow. `end`: that which ends an output."""
        self._first = first
        self._end = end
        self._most_at_first = most_at_first

    def confine(self, logits: Tensor, output: Sequence[int]) -> None:
        """Refuses in this row of logits what may not come after the output."""
        first = self._first
        logits[first - 1] = -torch.inf  # text without times does not begin here
        times = [token for token in output if token >= first]
        if not output:
            logits[:first] = -torch.inf
            logits[first + self._most_at_first + 1 :] = -torch.inf
        elif output[-1] < first:  # text, after which a time is later than the one before the text
            logits[first : times[-1] + 1 if times else first] = -torch.inf
        elif len(output) < 2 or output[-2] >= first:  # a pair, or the first time of all: text begins
            logits[first:] = -torch.inf
        else:  # the end of a text: the next one begins now or later, or there is none
            logits[: self._end] = -torch.inf
            logits[first : times[-1]] = -torch.inf
        if float(logits[first:].double().logsumexp(0)) > float(logits[:first].max()):
            logits[:first] = -torch.inf  # a time is likelier than each text, whichever time it is


class SpeechDecoder(EncoderDecoder):
    """An EncoderDecoder whose batches say what the encoder gave for the sounds of their prompts."""

    auto_model = AutoModelForSpeechSeq2Seq

    def __init__(self, model: nn.Module, ops: Ops, device: torch.device, **more: Any) -> None:
        super().__init__(model, ops, device, **more)
        self.encode = None
        speech = cast("SpeechSupport", self.encoder_support.speech)
        self._speech = speech
        self.picture_support = PictureSupport(
            refusal="", token_id=speech.placeholder, cell=1, num_positions=self.encoder_support.max_encoded
        )
        self._sounds = SoundEncoder(model, ops, self.picture_support, device)
        self.encode_picture = self._sounds
        generation = cast("Any", model).generation_config
        first = sorted(token for token in generation.begin_suppress_tokens or [] if 0 <= token < self.vocab_size)
        self._refused_first = torch.tensor(first, dtype=torch.int64, device=device)
        most = getattr(generation, "max_initial_timestamp_index", None)
        self._times = TimeRules(speech.first_time, speech.placeholder, MOST_AT_FIRST if most is None else int(most))

    @classmethod
    def load_with_encoder(
        cls,
        directory: Path,
        dtype: torch.dtype,
        ops: Ops,
        device: torch.device,
        context_tokens: int | None,
        packing: LinearPacking | None,
    ) -> "SpeechDecoder":
        _check_features(directory / FILE)
        return cast("SpeechDecoder", super().load_with_encoder(directory, dtype, ops, device, context_tokens, packing))

    def _find_support(self, config: Any, context_tokens: int | None) -> tuple[EncoderSupport, int]:
        generation = cast("Any", self._model).generation_config
        languages = {str(name).strip("<|>"): i for name, i in (getattr(generation, "lang_to_id", None) or {}).items()}
        tasks = dict(getattr(generation, "task_to_id", None) or {}) if languages else {}
        found = {name: getattr(generation, name, None) for name in TOKENS}
        ids = {name: _first_of(getattr(config, name, None) if i is None else i) for name, i in found.items()}
        for name, token in (ids | {f"lang_to_id {key}": i for key, i in languages.items()} | tasks).items():
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise BadModel(f"{self.name}: generation_config.json: {name} {token!r} is no token: take a newer one")
        start, end, no_timestamps, previous = ids.values()
        if getattr(generation, "is_multilingual", False) and not (languages and tasks):
            raise BadModel(f"{self.name}: generation_config.json has no lang_to_id and task_to_id: take a newer one")
        positions, most = int(config.max_source_positions), int(config.max_target_positions)
        speech = SpeechSupport(
            placeholder=end,  # which no text has in it
            start=start,
            no_timestamps=no_timestamps,
            previous=previous,
            max_previous=most // 2 - 1,
            languages=languages,
            tasks=tasks,
        )
        return EncoderSupport(start=(start,), max_encoded=positions, max_output=most, speech=speech), positions + most

    def _refuse(self, logits: Tensor, batch: TokenBatch, rows: Tensor) -> None:
        """What comes after the first token of all is a language, of which Transformers refuses none, or is only asked
        for its probability."""
        last, encoded = batch.token_ids[rows], cast("EncodedRows", batch.encoded)
        named = last == self._speech.start
        if not self._speech.languages:
            asked = [not tokens for tokens, _ in encoded.decoded] or [False] * len(encoded.lengths)
            named &= torch.tensor(asked, device=rows.device)[_owners(batch, rows)]
        for tokens, where in (
            (self._refused, ~named),
            (self._refused_first, last == self._speech.no_timestamps),
        ):
            chosen = where.nonzero()
            if len(tokens) and len(chosen):
                logits[chosen, tokens] = -torch.inf
        self._keep_times(logits, batch, rows, encoded)

    def _keep_times(self, logits: Tensor, batch: TokenBatch, rows: Tensor, encoded: EncodedRows) -> None:
        """Keeps the rules of times in the rows of sequences whose text has some."""
        has_times = self._speech.has_times
        timed = [len(tokens) >= count and has_times(tokens[:count]) for tokens, count in encoded.decoded]
        if not any(timed):
            return
        owners, places = _owners(batch, rows).tolist(), batch.positions[rows].tolist()
        for row, owner, place in zip(logits, owners, places, strict=True):
            if timed[owner]:
                tokens, num_prompt = encoded.decoded[owner]
                self._times.confine(row, tokens[num_prompt : place + 1 - encoded.lengths[owner]])

    def _encoded_to_check(self) -> tuple[list[int], Tensor]:
        count = self.encoder_support.max_encoded
        return [self.picture_support.token_id] * count, self._sounds(_noise(count), 1, count)

    def _own_inputs(self, encoded: list[int]) -> dict[str, Tensor]:
        return {"input_features": self._sounds.features(_noise(len(encoded)))}


def _owners(batch: TokenBatch, rows: Tensor) -> Tensor:
    """Of which sequence each row is."""
    return torch.bucketize(rows, batch.cu_q[1:], right=True)


def _check_features(path: Path) -> None:
    """Raises BadModel for a file that asks for other features than those that are made here."""
    try:
        content = read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise BadModel(f"{FILE}: {error}") from error
    if not isinstance(content, dict):
        raise BadModel(f"{FILE}: not an object")
    for name, value in ALWAYS.items():
        if content.get(name, value) not in (value, None):
            raise BadModel(f"{FILE}: {name} is {str(content[name])[:64]!r}, which is not done here")


def _noise(num_positions: int) -> bytes:
    """A sound by which the model is checked."""
    samples = [((i * 7919 + 13) % 2003 - 1001) / 4004 for i in range(num_positions * SAMPLES_PER_POSITION)]
    return struct.pack(f"<{len(samples)}f", *samples)


def _first_of(tokens: Any) -> Any:
    return tokens[0] if isinstance(tokens, list) and tokens else tokens
