"""Moving tensors between the members of a group."""
