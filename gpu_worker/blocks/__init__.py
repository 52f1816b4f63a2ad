"""The blocks of the KV cache: free, shared, cached by prefix, or in host memory. Imports no torch, gRPC or store."""
