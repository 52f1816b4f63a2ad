"""A tiny Whisper of random weights: in memory for reference, and on disk; and sounds for it, as files of WAV."""

import array
import json
import math
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import transformers
from folder_llama import save_noisy
from transformers.generation.logits_process import WhisperNoSpeechDetection

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startofprev|>", "<|notimestamps|>"]
END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMES = range(257, 265)
POSITIONS, SECONDS = 50, 1
FIRST_TIME = NO_TIMES + 1
USUAL, VOCABULARY = 272, FIRST_TIME + POSITIONS + 1  # sizes of a vocabulary: with a few times, and with all of a second
SIZES = {
    "vocab_size": USUAL,
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,  # which fills no whole registers
    "max_source_positions": POSITIONS,
    "max_target_positions": 64,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
LANGUAGES = {
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
}
SUPPRESSED = (7, 8, 9, END, START, PREVIOUS, NO_TIMES)  # the end, so that each output has its length
LETTERS = (ord(" "), *range(ord("a"), ord("z") + 1))
GENERATION = {
    "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "begin_suppress_tokens": [*range(110, 200), END],
    "return_timestamps": False,
    "max_length": 64,
}


class TinySpeech:
    """The model, with the tokens and settings by which real ones say what they know; and a tokenizer of bytes."""

    def __init__(
        self,
        directory: Path,
        *,
        multilingual: bool = True,
        suppress: Sequence[int] = SUPPRESSED,
        ends: float = 1.0,
        **sizes: object,
    ) -> None:
        """`suppress`: the tokens that it never writes; `ends`: how much louder than others it says that it ends."""
        torch.manual_seed(5)
        self.directory = directory
        self.model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**SIZES, **sizes}))
        self.model.eval()
        generation = {
            **GENERATION,
            "suppress_tokens": list(suppress),
            **(LANGUAGES if multilingual else {"is_multilingual": False}),
        }
        told = {
            name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        }
        self.model.generation_config = transformers.GenerationConfig(**told, **generation)
        save_noisy(self.model, directory)
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        for module in self.model.modules():  # so that it matters which token is where, and what is heard
            if isinstance(module, torch.nn.Embedding):
                module.weight.data.normal_(std=1.0)
            elif isinstance(module, (torch.nn.Linear, torch.nn.Conv1d)):
                module.weight.data.normal_(std=0.4)
        self.model.get_output_embeddings().weight.data[END] *= ends
        self.model.tie_weights()
        self.model.save_pretrained(directory)
        seconds = self.model.config.max_source_positions * 320 // 16000
        self.extractor = transformers.WhisperFeatureExtractor(chunk_length=seconds)
        self.extractor.save_pretrained(directory)
        path = directory / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.save(str(path))
        told = {"eos_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
        (directory / "tokenizer_config.json").write_text(json.dumps(told))

    @torch.inference_mode()
    def texts(self, samples: list[float], **given: object) -> list[tuple[int, int, tuple[int, ...]]]:
        """Start, end (in hundredths of a second) and tokens of each text that Transformers' own generate finds in a
        sound of any length, where the features of each of its parts are those of that part alone. Times end with it."""
        most = -(-len(samples) // 160)
        count, model = self.model.config.max_source_positions * 320, self.model

        def features_at(input_features: object, seek: torch.Tensor, **_: object) -> torch.Tensor:
            return self.features(samples[160 * int(seek[0]) :][:count])

        whole = self.extractor(samples, sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest")
        options = {"language": "en", "task": "transcribe", "condition_on_prev_tokens": False, **given}
        model._get_input_segment = features_at
        try:
            found = model.generate(
                whole.input_features, do_sample=False, return_timestamps=True, return_segments=True, **options
            )
        finally:
            del model._get_input_segment
        return [
            (*(min(most, round(100 * float(each[name]))) for name in ("start", "end")), tuple(each["tokens"].tolist()))
            for each in found["segments"][0]
        ]

    def judged_texts(
        self, samples: list[float], **given: object
    ) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[tuple[float, float, float]]]:
        """The same, and how Transformers judges each part: the mean log probability of its tokens, how much they repeat
        themselves, and how likely it is that nobody speaks."""
        model, found = self.model, []
        judge = model._need_fallback

        def noted(tokens, outputs, index, processors, config, vocab_size, temperature):
            mean = model._retrieve_avg_logprobs(outputs[index]["scores"], tokens, temperature)
            [silence] = [each.no_speech_prob for each in processors if isinstance(each, WhisperNoSpeechDetection)]
            ratio = model._retrieve_compression_ratio(tokens, vocab_size)
            found.append((float(mean), ratio, float(silence[index])))
            return judge(tokens, outputs, index, processors, config, vocab_size, temperature)

        model._need_fallback = noted
        try:
            options = {"temperature": (0.0,), "logprob_threshold": -1.0, "no_speech_threshold": 1.0, **given}
            return self.texts(samples, **options), found
        finally:
            del model._need_fallback

    def features(self, samples: list[float]) -> torch.Tensor:
        return self.extractor(samples, sampling_rate=16000, return_tensors="pt").input_features

    @torch.inference_mode()
    def logits(self, samples: list[float], decoded: list[int]) -> torch.Tensor:
        """Those that Transformers computes, for every token of the decoder."""
        features, ids = self.features(samples), torch.tensor([decoded])
        return self.model(input_features=features, decoder_input_ids=ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def generate(self, samples: list[float], count: int, **given: object) -> list[int]:
        """The output of Transformers' own generate, past the tokens by which the decoder starts."""
        options = {"language": "en", "task": "transcribe", "max_new_tokens": count, "eos_token_id": None, **given}
        return self.model.generate(self.features(samples), do_sample=False, **options)[0].tolist()


def spelled(tokens: Sequence[int]) -> str:
    """The letters among them."""
    return "".join(chr(token) for token in tokens if token in LETTERS)


def said(seconds: float, seed: int = 0, rate: int = 16_000) -> list[float]:
    """Samples of some tones, of 16 bits each."""
    rng = random.Random(seed)
    tones = [(rng.uniform(100, 3000), rng.uniform(0.05, 0.25)) for _ in range(3)]
    count = int(seconds * rate)
    found = [sum(loud * math.sin(2 * math.pi * hertz * i / rate) for hertz, loud in tones) for i in range(count)]
    return [round(each * 32767) / 32768 for each in found]


def wav(samples: list[float], rate: int = 16_000, channels: int = 1, kind: str = "int16") -> bytes:
    """A file of WAV, in which all channels have these samples."""
    many = [each for each in samples for _ in range(channels)]
    if kind == "int16":
        data, form, bits = array.array("h", [round(each * 32768) for each in many]).tobytes(), 1, 16
    else:
        data, form, bits = array.array("f", many).tobytes(), 3, 32
    return wav_of(
        struct.pack("<HHIIHH", form, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits), data
    )


def wav_of(form: bytes, data: bytes, size: int | None = None) -> bytes:
    """A file of WAV of these two parts, the second of which says that it has `size` bytes."""
    parts = b"fmt " + struct.pack("<I", len(form)) + form
    parts += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 4 + len(parts) & 0xFFFFFFFF) + b"WAVE" + parts


EDGE = "edge-of-a-part"
SAMPLES = said(0.8)
SOUND = wav(SAMPLES)


def form(sound=SOUND, edge=EDGE, **fields):
    """The bytes of a form with a file, and texts."""
    parts = [] if sound is None else [('name="file"; filename="a.wav"\r\nContent-Type: audio/wav', sound)]
    parts += [(f'name="{name}"', str(value).encode()) for name, value in fields.items()]
    data = b"".join(
        f"--{edge}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    )
    return data + f"--{edge}--\r\n".encode()
