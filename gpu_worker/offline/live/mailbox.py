"""Where a reader finds the outputs of its request: one at most, which has all that it has not read."""

import asyncio
from dataclasses import replace

from gpu_worker.offline.outputs import CompletionOutput, LogprobsByToken, RequestOutput, RequestOutputKind


class Mailbox:
    """All but `loop` is for that loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind) -> None:
        self.loop = loop
        self.kind = kind
        self.ended = False  # the last output, or an error, has come
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._there = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        before = self._output
        adds = before is not None and self.kind is RequestOutputKind.DELTA
        self._output = joined(before, output) if adds and before is not None else output
        self.ended = output.finished
        self._there.set()

    def fail(self, error: Exception) -> None:
        self._error, self.ended = error, True
        self._there.set()

    async def get(self) -> RequestOutput:
        """What has come since the last call; it waits until something has. Raises why the engine has ended."""
        await self._there.wait()
        output, self._output = self._output, None
        if output is None and self._error is not None:
            raise self._error
        if self._error is None:
            self._there.clear()
        return output or await self.get()


def joined(before: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two outputs with what is new as one."""
    branches = {branch.index: branch for branch in before.outputs}
    for branch in later.outputs:
        first = branches.get(branch.index)
        branches[branch.index] = _joined_branches(first, branch) if first else branch
    return replace(later, outputs=[branches[index] for index in sorted(branches)])


def _joined_branches(before: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs: list[LogprobsByToken] | None = None
    if before.logprobs is not None and later.logprobs is not None:
        logprobs = [*before.logprobs, *later.logprobs]
    return replace(
        later,
        text=before.text + later.text,
        token_ids=[*before.token_ids, *later.token_ids],
        logprobs=logprobs,
    )
