"""docs/models.md lists the models, types and files that the code knows, and no others."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import MODEL_ARCH_NAMES
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gpu_worker.models.model_kind import (
    ENCODER_DECODERS,
    ENCODERS,
    MODALITIES,
    OWN_DECODERS,
    RECURRENT,
    TEXT_PARTS,
    THROUGH_TRANSFORMERS,
    refuse_unservable,
)
from octavo.model_files.gguf import REMOVED_TYPES, TensorType
from octavo.model_files.gguf_support import ARCHITECTURES, DECODED
from octavo.model_files.quantization import ENCODED, PICTURES, SPEECH
from octavo.request.errors import BadModel
from octavo.text.tokenizers.gguf_vocabulary import PRE_TOKENIZERS

ROOT = Path(__file__).resolve().parent.parent
# A list is the rest of the line that its title is on, or what comes up to the next empty line.
LIST = re.compile(r"<!-- names: ([\w -]+) -->(?:\n(.*?)(?=\n\n|\Z)|([^\n]*))", re.DOTALL)
NAME = re.compile(r"`([\w.-]+)`")

TYPES = {kind.name for kind in TensorType}
EXPECTED = {
    "llama": {name for name, decoder in OWN_DECODERS.items() if decoder == "llama"},
    "gpt": {name for name, decoder in OWN_DECODERS.items() if decoder == "gpt"},
    "transformers": set(THROUGH_TRANSFORMERS),
    "pictures": set(PICTURES),
    "texts": set(TEXT_PARTS),
    "encoded": set(ENCODED),
    "speech": set(SPEECH),
    "encoders": set(ENCODERS),
    "encoder-decoders": set(ENCODER_DECODERS),
    "modalities": set(MODALITIES),
    "recurrent": set(RECURRENT),
    "pre-tokenizers": set(PRE_TOKENIZERS),
    "gguf architectures": set(ARCHITECTURES),
    "other gguf architectures": set(MODEL_ARCH_NAMES.values()) - set(ARCHITECTURES),
    "gguf types": {kind.name for kind in DECODED},
    "other gguf types": TYPES - {kind.name for kind in DECODED} | set(REMOVED_TYPES.values()),
}


SERVED = ("llama", "gpt", "transformers", "texts", "encoded", "speech")
BY_CONFIGURATION = ("own attention", "drafting")  # refused, though the code has no such list
REFUSED = ("encoders", "encoder-decoders", "modalities", "recurrent", *BY_CONFIGURATION)
NOT_REFUSED_BY_DEFAULT: dict[str, dict[str, Any]] = {  # or not to be made by default
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2},
}


def listed(text):
    """The names in backquotes of each list, by the title that stands before the list in a comment."""
    return {title: NAME.findall(block or line) for title, block, line in LIST.findall(text)}


PAGE = listed((ROOT / "docs/models.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("title", EXPECTED)
def test_a_list_of_the_page_is_that_of_the_code(title):
    names = PAGE[title]
    assert len(names) == len(set(names)), "a name stands there twice"
    assert not set(names) - EXPECTED[title], "the page has names that the code does not have"
    assert not EXPECTED[title] - set(names), "the code has names that the page does not have"


@pytest.mark.parametrize("name", [name for title in REFUSED for name in PAGE[title]])
def test_a_type_that_the_page_calls_refused_is_refused_by_its_configuration(name):
    """By the one that Transformers makes of nothing, which is that of a published model, or near it."""
    config = CONFIG_MAPPING[name](**NOT_REFUSED_BY_DEFAULT.get(name, {})).to_dict()
    with pytest.raises(BadModel, match=f"^it: {name}"):
        refuse_unservable("it", json.loads(json.dumps(config)))


def test_every_causal_language_model_of_transformers_stands_in_one_list():
    """A newer Transformers has more of them: whoever upgrades it looks at each, and says what comes of it."""
    assert set(PAGE) == {*EXPECTED, *BY_CONFIGURATION}
    count = Counter(name for title in (*SERVED, *REFUSED) for name in PAGE[title])
    assert {name: count[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if count[name] != 1} == {}
