"""The samples of each pipeline: shards, leases of their batches, and loaders that give what was leased."""
