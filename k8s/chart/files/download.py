"""What an init container runs that fetches a model from the hub into a folder, unless it is there already."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

name, program = os.environ["MODEL_HUB_NAME"], os.environ["MODEL_FOR"]
folder = Path(os.environ["MODEL_FOLDER"])
for done in folder.glob(".fetched-for-*"):
    if (there := done.read_text()) != name:  # files of two models in one folder would be read as one
        raise SystemExit(f"{folder} has {there}, and not {name}: give it a volume of its own")
done = folder / f".fetched-for-{program}"
unneeded = ["*.bin", "*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack", "original/*"]
if program == "router":  # it reads the tokenizer alone, which a GGUF file holds, too
    unneeded.append("*.safetensors")
if not done.exists():
    snapshot_download(name, local_dir=folder, ignore_patterns=unneeded)
    done.write_text(name)
