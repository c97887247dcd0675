"""The chain of blocks: finding it, cutting it, and running one stage's part of a step."""
