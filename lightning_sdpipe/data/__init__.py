"""Who trains which samples: shards, leases of their batches, and loaders that give what was leased."""
