"""A tokenizer with a chat template, for live processes whose runner has no model: `--tokenizer` of their routers.

Its tokens are all bytes and many pairs of letters, so that the tokens of a fake runner mostly have text, and some of
them half a character.
"""

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.tool_calls %} {{ message.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
END = "<|end|>"
VOCAB = 900  # the fake runner has 1000


def write_chat_tokenizer(folder: Path) -> Path:
    """Writes the files of the tokenizer into a new folder."""
    folder.mkdir()
    pairs = list(itertools.product(string.ascii_letters, repeat=2))[: VOCAB - 257]
    tokens = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
