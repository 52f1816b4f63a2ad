"""Serves clients: accepts requests and streams each sequence's tokens, once and in order."""
