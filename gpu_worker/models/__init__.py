"""Decoders: from token ids to logits; and how their weights are found, read and packed."""
