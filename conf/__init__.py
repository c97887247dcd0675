"""Hydra configuration: a folder for each group, a file for each option."""
