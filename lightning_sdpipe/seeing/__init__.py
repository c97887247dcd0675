"""Seeing a run: what its workers did, and which of them is slow. Nothing here changes a decision, and nothing but
``callback`` imports torch."""
