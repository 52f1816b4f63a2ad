"""docs/models.md lists the models, types and files that the code knows, and no others."""

import re
from pathlib import Path

import pytest
from gguf.constants import MODEL_ARCH_NAMES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from gpu_worker.models.model_kind import ENCODERS, OWN_DECODERS, RECURRENT, THROUGH_TRANSFORMERS
from octavo.model_files.gguf import REMOVED_TYPES, TensorType
from octavo.model_files.gguf_support import ARCHITECTURES, DECODED
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
    "encoders": set(ENCODERS),
    "recurrent": set(RECURRENT),
    "pre-tokenizers": set(PRE_TOKENIZERS),
    "gguf architectures": set(ARCHITECTURES),
    "other gguf architectures": set(MODEL_ARCH_NAMES.values()) - set(ARCHITECTURES),
    "gguf types": {kind.name for kind in DECODED},
    "other gguf types": TYPES - {kind.name for kind in DECODED} | set(REMOVED_TYPES.values()),
}


EXAMPLES = ("encoder-decoders", "latent", "own attention")  # of what is refused


def listed(text: str) -> dict[str, list[str]]:
    """The names in backquotes of each list, by the title that stands before the list in a comment."""
    return {title: NAME.findall(block or line) for title, block, line in LIST.findall(text)}


PAGE = listed((ROOT / "docs/models.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("title", EXPECTED)
def test_a_list_of_the_page_is_that_of_the_code(title: str) -> None:
    names = PAGE[title]
    assert len(names) == len(set(names)), "a name stands there twice"
    assert not set(names) - EXPECTED[title], "the page has names that the code does not have"
    assert not EXPECTED[title] - set(names), "the code has names that the page does not have"


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_of_what_is_refused_is_a_model_that_is_not_supported(title: str) -> None:
    assert PAGE[title]
    assert not set(PAGE[title]) - set(CONFIG_MAPPING_NAMES), "Transformers knows no such model"
    assert not set(PAGE[title]) & (set(OWN_DECODERS) | set(THROUGH_TRANSFORMERS))


def test_every_list_is_compared() -> None:
    assert set(PAGE) == {*EXPECTED, *EXAMPLES}


def test_a_list_ends_with_its_line_or_paragraph() -> None:
    text = "<!-- names: a -->\n`x`, `y_1`\n`z-2.0` and `no name`\n\n`w`\n| b | <!-- names: b --> `v` |\n| c | `u` |\n"
    assert listed(text) == {"a": ["x", "y_1", "z-2.0"], "b": ["v"]}
