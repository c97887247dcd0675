"""How tensors move between the replicas of a stage: movers; what a message holds; what is computed of messages."""
