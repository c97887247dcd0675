"""The worker's side of the protocol with the scheduler."""
