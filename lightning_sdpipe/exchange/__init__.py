"""Movement of tensors between the replicas of a stage: movers, the contents of messages, and what is computed of
them."""
