"""Files of tiny models, as llama.cpp's converter writes them."""

import pytest
from gguf_converter import convert


@pytest.fixture
def converted(made, tmp_path):
    """The file of a model that a test's `made` knows by a name, written with these options."""

    def write(name, *change, **options):
        path = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}.gguf"
        convert(made(name).directory, path, *change, **options)
        return path

    return write
