"""Running one stage of a pipeline."""
