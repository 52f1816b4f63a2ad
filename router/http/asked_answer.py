"""What a body asks for: the request that gRPC takes, and in which form the answer is given."""

from dataclasses import dataclass

from octavo.v1 import inference_pb2


@dataclass(slots=True)
class AskedAnswer:
    """One request of a client, and how it wants to be answered."""

    request: inference_pb2.GenerateRequest
    stream: bool = False
    include_usage: bool = False  # a stream ends with a chunk that has the usage
    scores: bool = False  # log probabilities are shown
    token_ids: bool = False  # token ids are shown
    echo: bool = False  # the prompt stands before each text
    no_output: bool = False  # the client wants the prompt's log probabilities alone; one token is generated and dropped
    chosen_id: bool = False  # the client has named the request, and so may come back to it
