"""What an init container runs that fetches a model from the hub into a folder, unless it is there already."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

folder, program = Path(os.environ["MODEL_FOLDER"]), os.environ["MODEL_FOR"]
done = folder / f".fetched-for-{program}"
unneeded = ["*.bin", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack", "original/*"]
if program == "router":  # it reads the tokenizer alone, which a GGUF file holds, too
    unneeded.append("*.safetensors")
if not done.exists():
    snapshot_download(os.environ["MODEL_HUB_NAME"], local_dir=folder, ignore_patterns=unneeded)
    done.touch()
