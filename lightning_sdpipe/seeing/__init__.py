"""Observes a run: what its workers did, and which of them is slow. No module here changes a decision, and only
``callback`` imports torch."""
