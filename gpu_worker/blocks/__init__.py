"""The blocks of the KV cache: free, shared, cached or in host memory. Nothing here imports torch, gRPC or the store."""
