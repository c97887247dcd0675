"""The worker's half of an elastic run: one whose pipelines come and go."""
