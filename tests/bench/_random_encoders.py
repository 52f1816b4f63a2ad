"""Models with an encoder, with random weights in the shapes of published ones: a folder as Transformers writes it.

The tokenizer is the demo model's, with as many tokens that no text becomes as the shape's vocabulary has more. That of
Whisper has its own special tokens where the published one has them.
"""

from pathlib import Path

import torch
import transformers
from _random_checkpoint import write_tokenizer

T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
BART = {"encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
BART |= {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "forced_eos_token_id": None}
BART |= {"normalize_before": False, "normalize_embedding": True}  # as published; read by CTranslate2
WHISPER = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
WHISPER |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "suppress_tokens": None}
END, START, ENGLISH, TRANSLATE, TRANSCRIBE = 50257, 50258, 50259, 50358, 50359
PREVIOUS, NO_SPEECH, NO_TIMES = 50361, 50362, 50363  # of the tokens of Whisper's tokenizer for many languages
IDS = {"pad_token_id": END, "bos_token_id": END, "eos_token_id": END, "decoder_start_token_id": START}
WHISPER |= {"begin_suppress_tokens": None, **IDS}
SPOKEN = {"is_multilingual": True, "lang_to_id": {"<|en|>": ENGLISH}, "alignment_heads": [[3, 1]]}
SPOKEN |= {"task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}}
SPOKEN |= {"no_timestamps_token_id": NO_TIMES, "prev_sot_token_id": PREVIOUS}
SHAPES = {
    "t5-base": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
    "bart-base": (transformers.BartForConditionalGeneration, transformers.BartConfig, BART),
    "whisper-base": (transformers.WhisperForConditionalGeneration, transformers.WhisperConfig, WHISPER),
}
SPECIAL = {"<|endoftext|>": END, "<|startoftranscript|>": START, "<|en|>": ENGLISH, "<|translate|>": TRANSLATE}
SPECIAL |= {"<|transcribe|>": TRANSCRIBE, "<|startofprev|>": PREVIOUS, "<|nospeech|>": NO_SPEECH}
SPECIAL |= {"<|notimestamps|>": NO_TIMES}


def write_encoder(shape: str, directory: Path) -> Path:
    """The folder of this shape below `directory`, with weights in float32. One that is there stays."""
    folder = directory / shape
    if (folder / "tokenizer.json").exists():
        return folder
    torch.manual_seed(1)
    kind, settings, sizes = SHAPES[shape]
    model = kind(settings(**sizes))
    if shape == "whisper-base":
        model.generation_config = transformers.GenerationConfig(**IDS, **SPOKEN)
        transformers.WhisperFeatureExtractor().save_pretrained(folder)
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size, SPECIAL if shape == "whisper-base" else {})
    return folder
