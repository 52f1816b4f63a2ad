"""What `helm test` runs in a pod: one Complete through the Service, with a certificate and an API key of a client."""

import os
import sys
from pathlib import Path

import grpc

from octavo.v1 import inference_pb2, inference_pb2_grpc

tls = Path(os.environ.get("TLS", ""))
if os.environ.get("TLS"):
    files = [(tls / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
    channel = grpc.secure_channel(os.environ["ENDPOINT"], grpc.ssl_channel_credentials(*files))
else:
    channel = grpc.insecure_channel(os.environ["ENDPOINT"])
key = Path(os.environ["API_KEY_FILE"]).read_text().strip() if os.environ.get("API_KEY_FILE") else ""
request = inference_pb2.GenerateRequest(text="Once upon a time", sampling={"max_tokens": 8})
if os.environ.get("MODEL"):  # of several, the first one
    request.model = os.environ["MODEL"]
with channel:
    answer = inference_pb2_grpc.InferenceStub(channel).Complete(
        request,
        metadata=[("authorization", f"Bearer {key}")] if key else None,
        timeout=120,
        wait_for_ready=True,
    )
print(answer)
if not answer.outputs or not answer.outputs[0].token_ids:
    sys.exit("the answer has no tokens")
