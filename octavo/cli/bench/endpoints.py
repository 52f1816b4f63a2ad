"""Which endpoint a URL names: grpc://HOST:PORT is octavo's gRPC, http:// and https:// are OpenAI's interface."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from octavo.cli.bench.endpoint_base import BenchEndpoint, RequestOptions
from octavo.cli.bench.grpc_endpoint import GrpcEndpoint
from octavo.cli.bench.openai_endpoint import OpenAiEndpoint
from octavo.request.errors import InvalidArgument
from octavo.wire.endpoint import parse_cells
from octavo.wire.tls import PLAIN, ClientCredentials

GRPC = "grpc://"
EXAMPLES = "grpc://127.0.0.1:50051, or http://127.0.0.1:8000 for an OpenAI-compatible server"


def make_endpoint(
    url: str,
    model: str | None,
    options: RequestOptions,
    *,
    credentials: ClientCredentials = PLAIN,
    keep_alive: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> BenchEndpoint:
    """The endpoint of a URL, not yet opened. Raises InvalidArgument for a URL that names none."""
    scheme, _, rest = url.partition("://")
    if url.startswith(GRPC):
        try:
            return GrpcEndpoint(url, parse_cells(rest), model, options, credentials)
        except ValueError as error:
            raise InvalidArgument(url, str(error)) from None
    if scheme in ("http", "https"):
        try:
            host, port = urlsplit(url).hostname, urlsplit(url).port
        except ValueError as error:
            raise InvalidArgument(url, f"{error}: write a URL such as {EXAMPLES}") from None
        if "@" in urlsplit(url).netloc:
            raise InvalidArgument("URL", "has a password, which others can read: put the key into --api-key-file")
        if not host or port == 0:
            raise InvalidArgument(url, f"has no host: write a URL such as {EXAMPLES}")
        return OpenAiEndpoint(url, model, options, credentials, keep_alive=keep_alive, extra=extra)
    raise InvalidArgument(url, f"is no URL with grpc://, http:// or https://: write one such as {EXAMPLES}")
