"""The worker's half of what workers and the scheduler say to each other."""
