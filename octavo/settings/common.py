"""What several programs say of the same setting, and how it is checked."""

import re
from collections.abc import Callable

DEMO_MODEL = "smollm2"  # the model of a package that is installed beside octavo
MODEL_HELP = f"a directory, a GGUF file, a hub name, or {DEMO_MODEL}, the demo model"
STORE_HELP = (
    "URL of the store: redis://HOST:PORT, with ,HOST:PORT for each further server of which one is the primary; "
    "rediss://, unix://, or memory:// within one process"
)
HOST_HELP = "host to listen on, in place of that in --listen and --http-listen; 0.0.0.0: every interface"

CERT_HELP = "file of this process's certificate, PEM; with --tls-key and --tls-ca every connection is TLS"
KEY_HELP = "file of the certificate's key, PEM, without a password"
CA_HELP = "file of the authorities, PEM, that sign the certificates of whoever calls and is called"
INSECURE_HELP = "allows to listen for other machines without TLS: whoever reaches the address can use it"


def unless_empty(check: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: check(text) if text else None


def require_device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
