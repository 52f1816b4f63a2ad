"""The tokenizer of a model as the package transformers has it, for callers of LLM.get_tokenizer."""

from pathlib import Path
from typing import Any

from octavo.request.errors import Unimplemented


def load_transformers_tokenizer(path: str) -> Any:
    """The tokenizer in a folder or in a GGUF file. It runs no code of the model, and uses no network.

    Raises Unimplemented if transformers cannot read it; LLM.tokenizer may work all the same.
    """
    from transformers import AutoTokenizer

    file = Path(path)
    folder, more = (file, {}) if file.is_dir() else (file.parent, {"gguf_file": file.name})
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **more)
    except Exception as error:  # the package raises whatever the file makes it raise
        raise Unimplemented(
            f"get_tokenizer: transformers cannot read {file.name}: {error}; use LLM.tokenizer"
        ) from error
