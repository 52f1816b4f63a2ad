"""Vectors and scores of prompts: what a call may ask, which worker computes it, and what becomes of a worker's loss."""
