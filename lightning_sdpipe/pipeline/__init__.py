"""Execution of one stage of a pipeline."""
