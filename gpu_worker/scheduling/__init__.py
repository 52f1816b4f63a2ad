"""Which sequences run in a step, and with which blocks. Nothing here imports torch, gRPC or the store."""
