"""What to do with a checkpoint whose weights are a pickle: octavo opens none, because it may contain code."""

import shlex
from pathlib import Path

# A command that makes model.safetensors of all pytorch_model*.bin in the current directory. Each tensor gets memory of
# its own, because safetensors stores none under two names.
_CONVERSION = (
    'python -c "import glob, torch, safetensors.torch as s; s.save_file({n: t.contiguous().clone() '
    "for f in glob.glob('pytorch_model*.bin') for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}"
    ", 'model.safetensors')\""
)


def find_pickle(directory: Path) -> str:
    """The name of a file with pickled weights in the directory; empty if there is none."""
    return next((path.name for path in sorted(directory.glob("pytorch_model*.bin"))), "")


def conversion(directory: Path) -> str:
    """The command that converts the directory's pickled weights."""
    return f"cd {shlex.quote(str(directory))} && {_CONVERSION}"
