"""Which sequences run in a step, with which blocks. Imports neither torch nor gRPC nor the store."""
