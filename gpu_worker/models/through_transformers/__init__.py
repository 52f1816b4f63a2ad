"""Decoders whose computation is Transformers' own, with pages in the place of attention."""
