"""OpenAI's HTTP API, in front of the same sessions that gRPC has."""
