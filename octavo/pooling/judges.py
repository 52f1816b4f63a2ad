"""Prompts by which a model says whether a document answers a query, by the likelihood of one word against another."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from octavo.request.errors import InvalidArgument

COSINE = "cosine"  # of two vectors: what a model does that is no judge


class Judge(NamedTuple):
    """The text before what a client sends, the text after it, and the words for and against."""

    before: str
    after: str
    instruction: str  # where a client gives none
    yes: str = "yes"
    no: str = "no"

    def body(self, query: str, document: str, instruction: str) -> str:
        return f"<Instruct>: {instruction or self.instruction}\n<Query>: {query}\n<Document>: {document}"


JUDGES = {
    "qwen3": Judge(
        before=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        ),
        after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    )
}
METHODS = (COSINE, *JUDGES)


class FramingTokenizer(Protocol):
    """What a judge needs of a tokenizer."""

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text alone. A special token that it spells is ordinary text."""
        ...

    def encode_frame(self, text: str) -> list[int]:
        """The ids of octavo's own text, in which special tokens are special."""
        ...


def chosen_method(asked: str, judge: str) -> str:
    """The method of a request, for a model that is such a judge. Raises InvalidArgument."""
    if asked and asked not in METHODS:
        raise InvalidArgument("method", f"{asked[:32]!r} is not one of {', '.join(METHODS)}")
    return asked or judge or COSINE


def judge_prompt(method: str, tokenizer: FramingTokenizer, query: str, document: str, instruction: str) -> list[int]:
    """The prompt after which the model says yes or no. The texts are a client's, and make no special token."""
    judge = JUDGES[method]
    body = tokenizer.encode_plain(judge.body(query, document, instruction))
    return [*tokenizer.encode_frame(judge.before), *body, *tokenizer.encode_frame(judge.after)]


def words(method: str, tokenizer: FramingTokenizer) -> Sequence[int]:
    """The tokens of yes and no. Raises InvalidArgument if the model has no single token for one of them."""
    judge, ids = JUDGES[method], list[int]()
    for word in (judge.yes, judge.no):
        found = tokenizer.encode_frame(word)
        if len(found) != 1:
            raise InvalidArgument(
                "method", f"{word!r} is {len(found)} tokens of this model, so it is no judge: {method}"
            )
        ids += found
    return ids
