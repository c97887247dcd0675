"""Samples of each pipeline: shards, leases of their batches, and loaders that give the leased batches."""
