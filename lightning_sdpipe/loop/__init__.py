"""Adaptations of Lightning's Trainer, its callbacks and precision plugins, which work per rank, to stages and
pipelines."""
