"""The chain of blocks of a model: finding it, cutting it, and running one stage's part of a step."""
