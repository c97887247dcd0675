"""Runs one stage of a pipeline."""
