"""An octavo deployment by gRPC, through the SDK.

The SDK costs the generator as much CPU per event as a bare gRPC stub does, and it is what users have. It repeats no
refused call here, so that refusals are seen; streams that break go on, as they do for users.
"""

from collections.abc import AsyncGenerator

from octavo.client import AsyncClient, RetryPolicy
from octavo.process.command_error import CommandError
from octavo.request.errors import ServingError, Unreachable
from octavo.wire.tls import PLAIN, ClientCredentials
from octavo_bench.endpoints.base import (
    BenchRequest,
    RequestFailed,
    RequestOptions,
    StreamPart,
    StreamTotals,
    chosen_model,
)

BROKEN_FOR_S = 10.0  # a stream that fails for this long without an event has failed


class GrpcEndpoint:
    """An octavo deployment: its cells, each with its routers."""

    kind = "grpc"

    def __init__(
        self,
        url: str,
        cells: tuple[tuple[str, ...], ...],
        model: str | None,
        options: RequestOptions,
        credentials: ClientCredentials = PLAIN,
    ) -> None:
        self.url = url
        self.model = model or ""
        self.vocab_size: int | None = None
        self._options = options
        policy = RetryPolicy(retry_ratio=0.0, min_retries=0, progress_timeout_s=BROKEN_FOR_S)
        self._client = AsyncClient(cells, policy=policy, credentials=credentials)

    async def open(self, timeout_s: float) -> None:
        try:
            await self._client.connect(timeout_s)
            models = {model.name: model for model in await self._client.models()}
        except Unreachable as error:
            raise CommandError(f"{self.url}: {error.message}: start it, or correct the URL") from None
        except ServingError as error:
            raise CommandError(f"{self.url}: {error.message}") from None
        self.model = chosen_model(self.url, self.model, list(models))
        self.vocab_size = models[self.model].vocab_size if self.model in models else None

    async def stream(self, request: BenchRequest) -> AsyncGenerator[StreamPart, None]:
        prompt = request.prompt
        if self._options.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            stream = self._client.generate(
                prompt,
                model=self.model,
                max_tokens=request.max_tokens,
                temperature=self._options.temperature,
                ignore_eos=self._options.ignore_eos,
            )
            async with stream:
                async for event in stream:
                    totals = None
                    if event.finished:
                        usage = event.finished.usage
                        totals = StreamTotals(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
                    yield StreamPart(event.text, len(event.token_ids), totals)
        except ServingError as error:
            raise RequestFailed(error.reason, error.message) from None

    async def close(self) -> None:
        await self._client.close()
