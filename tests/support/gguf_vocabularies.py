"""Small vocabularies that sentencepiece makes, as converters write those of Llama, Gemma 2 and Phi-3 into GGUF."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sentencepiece
from gguf import GGUFWriter

SENTENCES = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "def f(x):\n    return x + 1\n\n\nclass A:\n        pass",
    "12 345 6,789 in 2024",
    "naïve café 你好 世界",
] * 5
RUNS = [*("\n" * n for n in range(1, 6)), *("▁" * n for n in range(2, 8)), "\t", "<table>", "</td>", "<unused0>"]
CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN, NORMAL = 3, 4, 5, 6, 2, 1
TURNS = ("<start_of_turn>", "<end_of_turn>")
ADDED = ["<|endoftext|>", "<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|user|>"]  # to Phi-3's
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
GEMMA4_MARKS = ("<|turn>", "<turn|>", "<|think|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>')
GEMMA4_WORDS = GEMMA4_MARKS[3:]  # which the converter takes for words of the user
Change = Callable[[str, int], tuple[str, int]]


def train_vocabulary(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A vocabulary with the settings that Llama's and Gemma's have been trained with."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def kind_of(vocabulary: sentencepiece.SentencePieceProcessor, i: int) -> int:
    kinds = {"is_unknown": UNKNOWN, "is_control": CONTROL, "is_unused": UNUSED, "is_byte": BYTE}
    found = [kind for name, kind in kinds.items() if getattr(vocabulary, name)(i)]
    return found[0] if found else NORMAL


def escaped(text: str, kind: int) -> tuple[str, int]:
    """A converter of 2024: what users defined is as sentencepiece writes it."""
    return text, USER_DEFINED if text in RUNS or text in TURNS else kind


def unescaped(text: str, kind: int) -> tuple[str, int]:
    """A converter of today: what users defined is as texts have it, and turns are control tokens."""
    return (text.replace("▁", " "), USER_DEFINED) if text in RUNS else (text, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary and what a GGUF file says of it."""

    pieces: sentencepiece.SentencePieceProcessor
    change: Change = lambda text, kind: (text, kind)  # the text and the type that a converter writes for a token
    more: Sequence[tuple[str, int]] = ()  # tokens that are added, and their types
    fields: dict[str, Any]  # what else is written, by the names of GGUFWriter
    model: str = "llama"

    def __len__(self) -> int:
        return int(self.pieces.get_piece_size()) + len(self.more)

    def write_to(self, writer: GGUFWriter) -> None:
        size = self.pieces.get_piece_size()
        tokens = [self.change(self.pieces.id_to_piece(i), kind_of(self.pieces, i)) for i in range(size)]
        writer.add_tokenizer_model(self.model)
        writer.add_token_list([text for text, _ in [*tokens, *self.more]])
        writer.add_token_scores([self.pieces.get_score(i) for i in range(size)] + [-1000.0] * len(self.more))
        writer.add_token_types([kind for _, kind in [*tokens, *self.more]])
        for name, value in self.fields.items():
            getattr(writer, f"add_{name}")(value)


def llama_vocabulary() -> Vocabulary:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    return Vocabulary(pieces=train_vocabulary(vocab_size=600), fields=ids)


def gemma_vocabulary(change: Change) -> Vocabulary:
    """`change` is `escaped` or `unescaped`."""
    named = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"}
    symbols = {"user_defined_symbols": RUNS, "control_symbols": list(TURNS)}
    pieces = train_vocabulary(vocab_size=600, add_dummy_prefix=False, **symbols, **named)
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unk_token_id": 3, "pad_token_id": 0}
    fields = {"add_space_prefix": False, "chat_template": GEMMA_TEMPLATE, **ids}
    return Vocabulary(pieces=pieces, change=change, fields=fields)


def gemma4_vocabulary() -> Vocabulary:
    """With merges, and as the converter takes it from tokenizer.json, which has no types of tokens."""
    from transformers.convert_slow_tokenizer import generate_merges

    named = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"}
    symbols = {"user_defined_symbols": RUNS, "control_symbols": list(GEMMA4_MARKS)}
    pieces = train_vocabulary(vocab_size=600, add_dummy_prefix=False, **symbols, **named)
    words = {pieces.id_to_piece(i): i for i in range(len(pieces)) if kind_of(pieces, i) == NORMAL}
    merges = generate_merges(words, {word: pieces.get_score(i) for word, i in words.items()})

    def change(text: str, kind: int) -> tuple[str, int]:
        return text, USER_DEFINED if text in GEMMA4_WORDS else CONTROL if kind == UNKNOWN else kind

    ids = {"bos_token_id": 2, "eos_token_id": 1, "unk_token_id": 3, "pad_token_id": 0}
    fields = {"token_merges": [" ".join(pair) for pair in merges], "add_bos_token": False, **ids}
    return Vocabulary(pieces=pieces, change=change, fields=fields, model="gemma4")


def phi3_vocabulary() -> Vocabulary:
    """Llama's vocabulary, and tokens that are added to it. </s> is a word of the user there."""
    pieces = llama_vocabulary().pieces
    size = pieces.get_piece_size()
    ids = {"bos_token_id": 1, "eos_token_id": size, "unk_token_id": 0, "pad_token_id": size}
    return Vocabulary(
        pieces=pieces,
        change=lambda text, kind: (text, USER_DEFINED if text == "</s>" else kind),
        more=[(token, CONTROL) for token in ADDED],
        fields={"chat_template": PHI3_TEMPLATE, **ids},
    )
