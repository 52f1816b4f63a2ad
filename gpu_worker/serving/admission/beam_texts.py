"""The text in which stop strings end the beams of a search, made from the model's tokenizer as routers make it."""

import asyncio
import threading

from gpu_worker.steps.runner import RunnerInfo
from octavo.request.errors import Mismatch, NoTokenizer, ServingError
from octavo.request.sampling import SamplingParams
from octavo.text.stop import TextStream
from octavo.text.tokenizers.tokenizer import AnyTokenizer, open_tokenizer


class BeamTexts:
    """Makes a new text for each search. It loads the tokenizer when the first search with stop strings comes."""

    def __init__(self, info: RunnerInfo) -> None:
        self._info = info
        self._tokenizer: AnyTokenizer | None = None
        self._lock = threading.Lock()

    async def new_text(self, params: SamplingParams) -> TextStream | None:
        """None for a sequence whose beams no stop string can end.

        Raises ServingError if the tokenizer cannot be loaded here: another worker may have it.
        """
        if not (params.beam_width and params.stop):
            return None
        tokenizer = await asyncio.to_thread(self._load) if self._tokenizer is None else self._tokenizer
        if not tokenizer.has_text:  # a router may have one all the same, by its --tokenizer
            raise NoTokenizer(
                "this worker's model has no tokenizer, so no stop string ends a beam; send stop_token_ids"
            )
        return TextStream.of_branch(tokenizer.detokenizer(params.skip_special_tokens), params, self._info.eos_token_ids)

    def _load(self) -> AnyTokenizer:
        path = self._info.tokenizer
        with self._lock:
            try:
                self._tokenizer = self._tokenizer or open_tokenizer(path)
            except ServingError:
                raise
            except Exception as error:  # an unreadable tokenizer is no fault of the request
                raise Mismatch(f"tokenizer: {path} cannot be loaded here: {error}") from error
            return self._tokenizer
