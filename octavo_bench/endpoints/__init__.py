"""What `octavo bench` measures: octavo by gRPC, or any server with OpenAI's interface."""
