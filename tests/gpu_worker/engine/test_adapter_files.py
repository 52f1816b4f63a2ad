"""Files of adapters are those that were opened, whatever becomes of their folder, and come whole to another worker."""

import shutil
from collections.abc import AsyncIterator, Iterable
from itertools import chain
from pathlib import Path

import pytest
import torch
from loras import save_tiny_model, write_gguf_lora, write_lora

from gpu_worker.engine import adapter_files
from gpu_worker.engine.adapter_files import AdapterFiles, FilePiece, TakenFiles
from octavo.model_files.lora_files import read_lora
from octavo.request.errors import InvalidArgument, TooLarge


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and a GGUF file."""
    where = tmp_path_factory.mktemp("adapters")
    model = save_tiny_model(where / "tiny")
    folder = write_lora(where / "one", model, seed=1, dtype=torch.float16)
    heads = (model.config.num_attention_heads, model.config.num_key_value_heads)
    return folder, write_gguf_lora(where / "one.gguf", folder, "llama", heads)


async def arriving(pieces: Iterable[FilePiece]) -> AsyncIterator[FilePiece]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("piece_bytes", [7_000, 1 << 20])
async def test_what_was_opened_arrives_with_its_digest(sources, kind, piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_files, "PIECE_BYTES", piece_bytes)
    source = tmp_path / sources[kind].name
    shutil.copytree(sources[0], source) if kind == 0 else shutil.copy(sources[1], source)
    digest = read_lora(source).digest
    files = AdapterFiles(source)
    shutil.rmtree(source) if kind == 0 else source.unlink()
    first, second = files.pieces(), files.pieces()
    assert next(first) == next(second)  # nobody moves the other one's place
    for pieces in (files.pieces(), chain([next(files.pieces())], second)):
        with TakenFiles(1 << 30) as taken:
            path = await taken.write(arriving(pieces))
            assert read_lora(path, digest).digest == digest
        assert not path.exists()


async def test_names_and_sizes_that_no_adapter_has_are_refused() -> None:
    for name in ("../adapter_config.json", "model.safetensors", ""):
        with TakenFiles(1 << 20) as taken, pytest.raises(InvalidArgument, match="no file of an adapter"):
            await taken.write(arriving([FilePiece(name, b"x")]))
    with TakenFiles(-2 * adapter_files.MAX_HEADER + 3) as taken, pytest.raises(TooLarge):
        await taken.write(arriving([FilePiece("adapter_config.json", b"xx")] * 2))
