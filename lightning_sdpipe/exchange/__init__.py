"""How tensors move between the replicas of a stage: what a message holds, and what is computed from messages."""
