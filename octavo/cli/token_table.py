"""The table of `octavo generate --logprobs`: each token of a branch, its log probability, and its alternatives."""

from octavo.cli import output
from octavo.client import Client, Output, TokenLogprob
from octavo.request.errors import ServingError


def render(branch: Output, client: Client, model: str | None) -> str:
    """The table. A token is shown as text; a router that cannot say its text leaves the id alone."""
    found = [*(item.chosen for item in branch.logprobs), *(other for item in branch.logprobs for other in item.top)]
    texts = _texts(client, model, sorted({candidate.token_id for candidate in found}))

    def shown(candidate: TokenLogprob) -> str:
        return texts.get(candidate.token_id) or f"#{candidate.token_id}"

    rows = []
    for item in branch.logprobs:
        others = ", ".join(f"{shown(other)} {other.logprob:.3f}" for other in item.top)
        rows.append([item.chosen.token_id, shown(item.chosen), f"{item.chosen.logprob:.3f}", others])
    return output.table(["id", "token", "logprob", "likeliest"], rows)


def _texts(client: Client, model: str | None, token_ids: list[int]) -> dict[int, str]:
    try:
        return {each: repr(client.detokenize([each], model=model, skip_special_tokens=False)) for each in token_ids}
    except ServingError:
        return {}
