"""Decoders, which compute logits from token ids, and how their weights are found, read and packed."""
