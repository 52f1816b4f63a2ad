"""Each parameter of requests is taken over HTTP as it was written, or refused by the name that bodies have for it."""

import pytest
from parameter_values import beyond, inside

from octavo.request.errors import InvalidArgument
from octavo.request.sampling import PARAMETERS
from octavo.wire.public import sampling_from_wire
from router.http.bodies.chat_body import read_chat
from router.http.bodies.completion_body import read_completion

BASES = [(read_completion, {"prompt": "x"}), (read_chat, {"messages": [{"role": "user", "content": "x"}]})]


@pytest.mark.parametrize(("read", "base"), BASES)
@pytest.mark.parametrize("row", [row for row in PARAMETERS.values() if row.http], ids=lambda row: row.name)
def test_a_parameter_is_taken_or_refused(read, base, row):
    for value in inside(row):
        written = {str(token): bias for token, bias in value.items()} if row.name == "logit_bias" else value
        listed = list(written) if isinstance(written, tuple) else written
        params = sampling_from_wire(read({**base, row.http: listed}).request.sampling)
        assert getattr(params, row.name) == pytest.approx(value)
    wider = row.name in ("seed", "top_k")  # signed, as OpenAI has it; none, as vLLM has it
    for value in beyond(row) if row.allowed else []:
        if value not in (None, 1.0) and not (wider and value == -1):  # left out; whole
            with pytest.raises(InvalidArgument, match=f"^{row.http}: .*{'' if wider else row.allowed}"):
                read({**base, row.http: value})
