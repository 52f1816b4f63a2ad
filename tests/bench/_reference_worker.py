"""`python -m gpu_worker` as it runs where the extension was not built."""

import sys

from gpu_worker.__main__ import main
from gpu_worker.ops import native

if __name__ == "__main__":
    native.load = lambda: None
    sys.exit(main())
